"""One line and exit code 2 for user errors, a traceback for everything else."""

import errno
import os

import pytest

from mapd_verl.errors import UserError, describe, one_line_errors


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("a\n  b"), "a b"),
        (OSError(errno.ENOSPC, "No space left on device", "x.sqlite"), "x.sqlite: disk full"),
        (OSError(errno.EADDRINUSE, "Address already in use"), "port already taken"),
        (FileNotFoundError(errno.ENOENT, "No such file", "q.parquet"), "q.parquet: no such file"),
        (ValueError("a bug"), None),
        (OSError("no errno"), None),
    ],
)
def test_describe(error, line):
    assert describe(error) == line


def test_user_error_is_one_line_and_exit_code_2(capsys):
    @one_line_errors("prog")
    def main():
        raise UserError("no such key 'x'")

    assert main() == 2
    assert capsys.readouterr().err == "prog: error: no such key 'x'\n"


def test_the_programs_own_faults_keep_their_traceback():
    @one_line_errors("prog")
    def main():
        raise KeyError("bug")

    with pytest.raises(KeyError):
        main()


def test_traceback_on_request(monkeypatch):
    monkeypatch.setenv("MAPD_TRACEBACK", "1")

    @one_line_errors("prog")
    def main():
        raise UserError("x")

    with pytest.raises(UserError):
        main()


def test_results_and_interrupts(capsys):
    @one_line_errors("prog")
    def good():
        return None

    @one_line_errors("prog")
    def stopped():
        raise KeyboardInterrupt

    assert good() == 0
    assert stopped() == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_full_disk_is_named(capsys):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")

    @one_line_errors("prog")
    def main():
        with open("/dev/full", "w") as file:
            file.write("x")

    assert main() == 2
    assert "disk full" in capsys.readouterr().err
