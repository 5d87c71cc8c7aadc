"""Python ends while a read is under way."""

import threading

from tests.programs.faults.tools import in_flight, load

hold = in_flight(model := load())
threading.Timer(0.05, hold.leave.set).start()
