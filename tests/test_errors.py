import errno
import inspect
import re
from typing import Any

import pytest

from longhaul import errors, native
from longhaul.errors import LonghaulError
from longhaul.library import lib_dir

LINE = re.compile(r"(?P<lead>[│├└─ ]*)(?P<name>\w+)(?: \((?P<builtin>\w+)\))? +(?P<meaning>\S.*)")


def documented_tree() -> dict[str, tuple[str, str | None]]:
    """Return parent and built-in base of each class that the docstring draws."""
    tree: dict[str, tuple[str, str | None]] = {}
    above: list[str] = []  # the class last seen at each depth
    assert errors.__doc__ is not None
    for line in errors.__doc__.splitlines()[2:]:
        match = LINE.fullmatch(line)
        assert match is not None, line
        depth, rest = divmod(len(match["lead"]), 4)
        assert rest == 0, line
        above[depth:] = [match["name"]]
        tree[match["name"]] = (above[depth - 1] if depth else "Exception", match["builtin"])
    return tree


def classes() -> dict[str, Any]:
    found = inspect.getmembers(errors, inspect.isclass)
    ours = {name: value for name, value in found if value.__module__ == errors.__name__}
    assert all(issubclass(value, BaseException) for value in ours.values())
    return ours


def test_docstring_draws_every_class_with_its_bases() -> None:
    tree = documented_tree()
    assert set(tree) == set(classes())
    for name, (parent, builtin) in tree.items():
        bases = {base.__name__ for base in classes()[name].__bases__}
        assert bases == {parent, builtin} - {None}, name


@pytest.mark.parametrize("name", sorted(classes()))
def test_every_error_is_ours_and_says_what_it_is(name: str) -> None:
    made = classes()[name]("what was wrong")
    assert isinstance(made, LonghaulError)
    assert str(made) == "what was wrong"
    assert type(made).__doc__


def test_a_read_error_is_an_os_error_with_its_errno() -> None:
    error = errors.ReadError(errno.EIO, "m.gguf: 4096 bytes at 8192")
    assert error.errno == errno.EIO
    assert error.strerror == "m.gguf: 4096 bytes at 8192"
    assert str(error) == f"[Errno {errno.EIO}] m.gguf: 4096 bytes at 8192"
    for kind in (OSError, errors.NativeError, LonghaulError, RuntimeError):
        assert isinstance(error, kind)


# --- native statuses ------------------------------------------------------------------------------


@pytest.fixture
def statuses() -> dict[int, str]:
    """Names of all statuses of the library, by value."""
    try:
        lib_dir()
    except errors.PatchError as e:
        pytest.skip(str(e))
    found: dict[int, str] = native._ffi().typeof("lh_status").elements
    return found


def test_every_status_has_an_exception(statuses: dict[int, str]) -> None:
    assert statuses.pop(native.OK) == "LH_STATUS_OK"
    assert len(statuses) >= 6
    for status, name in statuses.items():
        error = native.exception_for(status, "why", 0)
        assert isinstance(error, LonghaulError), name
        assert "why" in str(error), name


def test_statuses_become_the_most_exact_class(statuses: dict[int, str]) -> None:
    value = {name: number for number, name in statuses.items()}
    invalid = native.exception_for(value["LH_STATUS_INVALID_ARGUMENT"], "why", 0)
    assert type(invalid) is errors.ConfigError
    for name in ("NO_MEMORY", "CALLBACK", "STATE", "INTERNAL"):
        error = native.exception_for(value[f"LH_STATUS_{name}"], "why", 0)
        assert type(error) is errors.NativeError
    io = native.exception_for(value["LH_STATUS_IO"], "why", errno.ENXIO)
    assert type(io) is errors.ReadError
    assert io.errno == errno.ENXIO
    short = native.exception_for(value["LH_STATUS_IO"], "why", 0)  # no errno: a short read
    assert isinstance(short, errors.ReadError)
    assert short.errno == errno.EIO


def test_check_lets_success_pass() -> None:
    native.check(native.OK)
