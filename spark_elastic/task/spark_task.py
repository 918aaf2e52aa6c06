import os

from spark_elastic.task.place import TaskPlace


def task_place() -> TaskPlace:
    return TaskPlace(host=os.environ.get("SPARK_LOCAL_IP") or "127.0.0.1", executor=str(os.getppid()), cores=1)
