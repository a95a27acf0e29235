"""What a page of the course begins with, in one import.

    from minillm.course.show.page import *

Guesses, tables, pictures, the package's source and what is recorded. What a page builds it writes itself; what it
measures it imports where it measures it.
"""

from __future__ import annotations

import os

from minillm.course.setting import Setting
from minillm.course.show import drawings, plots, service_plots
from minillm.course.show.diff import show_diff
from minillm.course.show.guesses import guess, guesses, reveal
from minillm.course.show.live import progress
from minillm.course.show.recorded import ledger, recorded
from minillm.course.show.source import show_source
from minillm.course.show.tables import text_table
from minillm.measure.measurement import device_name

__all__ = [
    "QUICK", "Setting", "device_name", "drawings", "guess", "guesses", "ledger", "plots", "progress", "recorded",
    "reveal", "service_plots", "show_diff", "show_source", "text_table",
]

QUICK = os.environ.get("MINILLM_QUICK") == "1"  # small sizes, for tests
