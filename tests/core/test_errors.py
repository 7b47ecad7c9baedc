"""The error tree: what its file draws is what the classes are."""

import re
from collections.abc import Iterator

from mlxkv.core import errors
from mlxkv.core.errors import DamagedBlockError, MlxkvError

_DRAWN = re.compile(r"^ {4}(?P<branch>[│├└─ ]*)(?P<name>\w+Error) +(?P<exit_code>\d) +(?P<http_status>\d{3})", re.M)


def tree(cls: type[MlxkvError]) -> Iterator[type[MlxkvError]]:
    yield cls
    for child in cls.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


def test_the_tree_in_the_docstring_is_the_tree_of_classes():
    drawn, parents = {}, {}
    for line in _DRAWN.finditer(errors.__doc__):
        depth = len(line["branch"]) // 4
        parents[depth] = line["name"]
        drawn[line["name"]] = (parents.get(depth - 1, "Exception"), int(line["exit_code"]), int(line["http_status"]))
    real = {cls.__name__: (cls.__base__.__name__, cls.exit_code, cls.http_status) for cls in tree(MlxkvError)}
    assert drawn == real


def test_a_damaged_block_names_the_check_that_failed():
    error = DamagedBlockError("payload digest")
    assert error.reason == "payload digest"
    assert "payload digest" in str(error)
