"""All tests of this folder have the mark `gpu`, are skipped without a CUDA device, and leave CUDA as it was.

On a machine with a GPU: `pytest tests/gpu`. Without one: `pytest -n 0 -p tests.simulated.as_gpus tests/gpu`.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.simulated.devices.installation import is_installed

_FOLDER = Path(__file__).parent
_WITHOUT_CUDA = "needs a CUDA device, and to be run alone: pytest tests/gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not item.path.is_relative_to(_FOLDER):
            continue
        item.add_marker(pytest.mark.gpu)
        not_simulated = item.get_closest_marker("not_simulated")
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason=_WITHOUT_CUDA))
        elif not_simulated is not None and is_installed():
            item.add_marker(pytest.mark.skip(reason=f"simulated devices have {not_simulated.args[0]}"))


@pytest.fixture(autouse=True)
def cuda_as_it_was() -> Iterator[None]:
    """Fail if a test leaves another current device or stream, or another setting of CUDA."""
    if not torch.cuda.is_available():
        yield
        return
    before = settings()
    yield
    torch.cuda.synchronize()
    assert settings() == before


def settings() -> dict[str, object]:
    backends = torch.backends
    return {
        "device": torch.cuda.current_device(),
        "stream": torch.cuda.current_stream(),
        "waits are errors": torch.cuda.get_sync_debug_mode(),
        "benchmark": backends.cudnn.benchmark,
        "deterministic": backends.cudnn.deterministic,
    }


@pytest.fixture
def waits_allowed_again() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")
