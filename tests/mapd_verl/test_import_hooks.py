import sys

import pytest

from mapd_verl.import_hooks import when_imported


@pytest.fixture
def module(tmp_path, monkeypatch):
    name = f"hooked_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    sys.modules.pop(name, None)


def test_runs_after_the_import_in_order_and_once(module):
    seen = []
    when_imported(module, lambda: seen.append(("first", sys.modules[module].value)))
    when_imported(module, lambda: seen.append(("second", sys.modules[module].value)))
    assert seen == []
    imported = __import__(module)
    assert seen == [("first", 1), ("second", 1)]
    assert imported.__spec__.name == module and imported.__file__.endswith(f"{module}.py")
    __import__(module)
    assert len(seen) == 2


def test_runs_at_once_if_it_is_there_already(module):
    __import__(module)
    seen = []
    when_imported(module, lambda: seen.append(1))
    assert seen == [1]


def test_an_error_fails_the_import(module):
    def broken():
        raise LookupError("no registry")

    when_imported(module, broken)
    with pytest.raises(LookupError, match="no registry"):
        __import__(module)
    assert module not in sys.modules


def test_a_module_that_does_not_exist_stays_missing():
    when_imported("hooked_never_there", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        __import__("hooked_never_there")
