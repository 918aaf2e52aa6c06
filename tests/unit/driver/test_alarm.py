from spark_elastic.driver.elastic_driver import Alarm


class Loop:
    """Keeps the calls that are due, and makes them when told to."""

    def __init__(self):
        self.due = []

    def call_at(self, at, call):
        self.due.append(Call(self, at, call))
        return self.due[-1]

    def ring(self):
        first = min(self.due, key=lambda each: each.at)
        self.due.remove(first)
        first.call()


class Call:
    def __init__(self, loop, at, call):
        self.loop, self.at, self.call = loop, at, call

    def when(self):
        return self.at

    def cancel(self):
        self.loop.due.remove(self)


def test_moving_an_alarm_to_a_later_time_leaves_the_call_where_it_is():
    loop, rung = Loop(), []
    alarm = Alarm(loop, lambda: rung.append(1))
    for due in (5.0, 6.0, 7.0):
        alarm.set(due)
    assert [each.at for each in loop.due] == [5.0]
    loop.ring()
    assert rung == [1]
    alarm.set(7.0)  # as whoever is rung too early does
    assert [each.at for each in loop.due] == [7.0]


def test_moving_an_alarm_to_an_earlier_time_moves_the_call():
    loop = Loop()
    alarm = Alarm(loop, print)
    alarm.set(5.0)
    alarm.set(3.0)
    assert [each.at for each in loop.due] == [3.0]


def test_alarm_that_is_not_needed_any_more_does_not_ring():
    loop = Loop()
    alarm = Alarm(loop, print)
    alarm.set(5.0)
    alarm.set(None)
    assert loop.due == []
    alarm.set(None)
