from spark_elastic.spark.executor_process import cores_in_task, executor_id_of, slot_report

STANDALONE = "/usr/bin/java -Xmx1g org.apache.spark.executor.CoarseGrainedExecutorBackend --executor-id 3 --hostname h"


def test_executor_id_is_read_from_the_command_line_of_the_executors_jvm():
    assert executor_id_of(STANDALONE.split(), {}) == "3"


def test_jvm_without_an_executor_id_is_the_driver_of_local_mode():
    assert executor_id_of(["java", "org.apache.spark.deploy.SparkSubmit", "pyspark-shell"], {}) == "driver"


def test_executor_id_comes_from_the_environment_if_the_command_line_is_unreadable():
    assert executor_id_of(None, {"SPARK_EXECUTOR_ID": "12"}) == "12"
    url = "http://10.0.0.2:8081/logPage/?appId=app-1&executorId=7&logType=stdout"
    assert executor_id_of(None, {"SPARK_LOG_URL_STDOUT": url}) == "7"
    assert executor_id_of(None, {}) == "driver"


def test_process_outside_of_spark_counts_as_local():
    assert slot_report().executor == "driver"
    assert cores_in_task() == 1
