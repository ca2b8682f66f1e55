"""Values of a configuration against annotations: what is refused, and what passes unchecked."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, Tuple, TypeVar  # noqa: UP035

import pytest
import torch

from equipoise import ConfigurationError
from equipoise.app.config.annotations import accepts, check_types

if TYPE_CHECKING:
    from somewhere import Unknown

T = TypeVar("T")


@pytest.mark.parametrize(
    ("annotation", "right", "wrong"),
    [
        (int, [1, -3], [1.5, "1", True, None, [1], {}]),
        (float, [1, 0.5, float("inf")], ["abc", True, None, [0.1]]),
        (bool, [True, False], [1, "true", None]),
        (str, ["a", "", 2024], [None, ["a"], {}]),
        (Path, ["a/b"], [None, []]),
        (None, [None], [0, ""]),
        (Optional[float], [None, 0.5], ["abc"]),  # noqa: UP045
        (int | torch.dtype, [1, "float32", None], []),
        (Literal["relu", 1], ["relu", 1], ["tanh", None, True]),
        (list, [[], [1, "a"]], ["a", None, {}]),
        (list[int], [[], [1, 2]], [["a"], 3, None, [None]]),
        (tuple[int, int], [[1, 2]], [[1], [1, "a"], 1]),
        (Tuple[int, ...], [[], [1, 2, 3]], [["a"]]),  # noqa: UP006
        (Sequence[str], [["a"], "a"], [3, None]),
        (Iterable[int], [[1]], [None, ["a"]]),
        (Mapping[str, list[int]], [{"a": [1]}], [{"a": 1}]),
        (Annotated[int, "a note"], [1], ["a"]),
    ],
)
def test_plain_types(annotation: Any, right: list[Any], wrong: list[Any]) -> None:
    assert [value for value in right if not accepts(annotation, value)] == []
    assert [value for value in wrong if accepts(annotation, value)] == []


@pytest.mark.parametrize("annotation", [Any, T, torch.nn.Module, "text", type[int], int.__add__])
def test_every_other_annotation_accepts_everything(annotation: Any) -> None:
    for value in (1, "a", None, [], {}):
        assert accepts(annotation, value)


@pytest.mark.parametrize("annotation", [int, list[int], Literal["a"]])
def test_what_is_yet_to_be_built_is_accepted(annotation: Any) -> None:
    assert accepts(annotation, {"_target_": "torch.nn.ReLU"})


class Annotated_:
    def __init__(
        self,
        width: "int",
        unknown: "Unknown" = None,
        wrong: int = None,  # noqa: RUF013
        untyped=3,
        *args: int,
        **more: int,
    ) -> None: ...


class Heir(Annotated_):
    """Has the constructor of another class."""


@pytest.mark.parametrize("target", [Annotated_, Heir])
def test_an_annotation_that_cannot_be_relied_on_is_passed_over(target: type) -> None:
    check_types(target, {"width": 1, "unknown": "a", "wrong": "a", "untyped": "a", "args": "a", "more": "a"}, "module")
    with pytest.raises(
        ConfigurationError, match=rf"^module\.width must be of type int, as {target.__name__} annotates"
    ):
        check_types(target, {"width": "wide"}, "module")
