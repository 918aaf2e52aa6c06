"""BusListener: collects events of Spark's listener bus inside the JVM, for a Python thread to read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spark_elastic.spark.jvm import jvm_context

if TYPE_CHECKING:
    from pyspark import SparkContext

log = logging.getLogger(__name__)

_INTERFACE = "org.apache.spark.scheduler.SparkListenerInterface"
_BUS_QUEUE = "spark_elastic"
"""A bus queue for these listeners alone, so that they and others do not wait for each other."""

EVENT = ""
"""The "property" that is the event itself."""


class BusListener:
    """A listener that adds each event, or one property of it, to a collection in the JVM, until `close`.

    No Python code runs in Spark's listener: the JDK's own `java.beans.EventHandler` implements it inside the JVM
    (docs/decisions/02-host-discovery.md). Raises Py4JError if the JRE was cut down to lack it. `collect`: by method of
    `SparkListenerInterface`, the collection, which several threads may use, and the property of the event to add to it.
    """

    def __init__(self, sc: SparkContext, collect: Mapping[str, tuple[Any, str]]) -> None:
        jvm: Any = sc._jvm
        self._bus = jvm_context(sc).listenerBus()
        interface = jvm.java.lang.Thread.currentThread().getContextClassLoader().loadClass(_INTERFACE)
        create = jvm.java.beans.EventHandler.create
        self._listeners = [create(interface, into, "add", name, method) for method, (into, name) in collect.items()]
        for listener in self._listeners:
            self._bus.addToQueue(listener, _BUS_QUEUE)

    def close(self) -> None:
        """Leave the bus, which ends its queue and thread in the JVM. May be called again."""
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            try:
                self._bus.removeListener(listener)
            except Exception as error:  # the context and its bus are stopped, which Spark reports in several ways
                log.debug("a listener ended with its SparkContext: %s", error)
