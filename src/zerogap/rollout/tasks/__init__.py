"""The built-in tasks by name. The names are those of `data.task`; a test holds the two together."""

from __future__ import annotations

from zerogap.rollout.tasks.compare import CMP2, MAX4
from zerogap.rollout.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (MAX4, CMP2)}

__all__ = ["TASKS", "Task"]
