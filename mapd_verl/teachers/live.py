"""MAPD's teacher: the policy at this very moment."""

from mapd_verl.teachers.base import Teacher


class Live(Teacher):
    """The engine's module as it is; costs no memory."""

    name = "live"
    head = "student"
