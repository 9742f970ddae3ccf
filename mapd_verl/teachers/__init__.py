"""Teachers: one file each; a recipe names one (``mapd.teacher.kind``). docs/teachers.md compares them."""

from __future__ import annotations

from mapd_verl.config.method import TeacherConfig
from mapd_verl.teachers.base import Teacher
from mapd_verl.teachers.ema import EMA
from mapd_verl.teachers.external import External
from mapd_verl.teachers.fixed import Fixed
from mapd_verl.teachers.live import Live
from mapd_verl.teachers.snapshot import Snapshot

TEACHERS: dict[str, type[Teacher]] = {teacher.name: teacher for teacher in (Live, Snapshot, EMA, Fixed, External)}


def make_teacher(config: TeacherConfig) -> Teacher:
    """The teacher that a recipe names."""
    return TEACHERS[config.kind](config)


__all__ = ["TEACHERS", "Teacher", "make_teacher"]
