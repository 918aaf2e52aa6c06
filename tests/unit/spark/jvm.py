"""Objects of Spark's JVM that count the calls of their methods, instead of Py4J's."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Remote:
    """An object in the JVM. Its methods are the keywords: functions, or the values that they return."""

    def __init__(self, calls: list[str], **methods: Any) -> None:
        self._calls = calls
        self._methods = methods

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in self._methods:
            raise AttributeError(name)
        method = self._methods[name]

        def call(*arguments: Any) -> Any:
            self._calls.append(name)
            return method(*arguments) if callable(method) else method

        return call


class Application:
    """A Spark application with executors of one slot each."""

    def __init__(self, executors: int) -> None:
        self.calls: list[str] = []
        self.active = [str(number) for number in range(executors)]
        self.leaving: dict[str, bool] = {}
        """Executors that are registered but not active; True: Spark says that they are being decommissioned."""
        self.stopped = False
        remote = self._remote
        state = lambda executor: remote(isDefined=self.leaving.get(executor, False))  # noqa: E731
        scheduler = remote(
            getExecutorDecommissionState=state,
            runningTasksByExecutors=lambda: remote(
                values=remote(mkString=lambda gap: gap.join("1" * len(self.active)))
            ),
        )
        self.context = remote(
            isLocal=False,
            isStopped=lambda: self.stopped,
            getExecutorIds=self._ids,
            maxNumConcurrentTasks=lambda profile: len(self.active),
            resourceProfileManager=remote(defaultResourceProfile=remote()),
            schedulerBackend=remote(isExecutorActive=lambda executor: executor in self.active),
            taskScheduler=scheduler,
        )
        self.sc: Any = SimpleNamespace(
            version="4.3.0", master="spark://here:7077", _jsc=remote(sc=self.context), _gateway=None, _conf={}
        )

    def _remote(self, **methods: Any) -> Remote:
        return Remote(self.calls, **methods)

    def _ids(self) -> Remote:
        ids = [*self.active, *self.leaving]
        return self._remote(size=len(ids), mkString=lambda gap: gap.join(ids))
