"""Fast forms of composed attention, which register themselves in the operator's table: C++ for CPUs."""

from .native import register as register
