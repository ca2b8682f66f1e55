"""A plugin of pytest: all tests of this process run on simulated CUDA devices.

Use it as `python -m pytest -p tests.simulated.plugin FILE ...`. Each device "cpu" that a Trainer receives becomes
cuda:0, cuda:1, cuda:0 and so on, in turn.
"""

import pytest

from tests.simulated.devices import installation

installation.install()

# Behind the installation: these import torch.
from tests.support.quick_cases import cases_of_tests, name_of_test, spread  # noqa: E402

__all__ = ["ON_OTHER_DEVICES_ONLY"]

pytest_plugins = ["tests.simulated.as_gpus"]

_PIPELINE = "tests/extensions/pipeline/strategy"
_PROCESSES = "tests/extensions/pipeline/processes"
_REPLICATED = "tests/strategies/replicated"
_NO_SPARSE = "the simulation has no sparse tensors"
_IN_ORDER = "expects the parts of a batch in order, but devices compute them at the same time"

# Tests that cannot pass on simulated devices, each with the reason. They are deselected. A name without parameters
# stands for all cases of a test.
ON_OTHER_DEVICES_ONLY = {
    f"{_PIPELINE}/test_pipeline.py::test_sparse_gradients": _NO_SPARSE,
    f"{_PROCESSES}/test_processes.py::test_a_tensor_that_cannot_be_sent_is_named": _NO_SPARSE,
    f"{_PIPELINE}/test_pipeline.py::test_optimizers_and_schedulers[LBFGS]": (
        "LBFGS needs all parameters on one device, and is refused where there are several"
    ),
    f"{_PIPELINE}/test_pipeline.py::test_tensors_that_the_forward_makes_by_itself": (
        "the forward makes tensors on the CPU, which no operation takes together with those of another device"
    ),
    f"{_PIPELINE}/test_refusals.py::test_shared_layers_with_statistics_on_one_device": (
        "stages of one device share the layer; there are two devices here"
    ),
    f"{_REPLICATED}/test_replicated.py::test_batches_are_cut_in_the_dimension_of_samples_and_weigh_as_many": _IN_ORDER,
    f"{_REPLICATED}/test_forward.py::test_the_step_runs_once_and_forward_in_parts": _IN_ORDER,
    f"{_REPLICATED}/test_balanced.py::test_first_device_batch_size_cuts_batches": (
        "the third device is the first one again, so its part is not the last one"
    ),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that leaves out cases."""
    parser.addoption("--most-cases", type=int, metavar="N", help="run at most N cases of each test, evenly spread")


def pytest_configure(config: pytest.Config) -> None:
    """Let every Trainer of this process use the simulated devices."""
    from tests.simulated.devices.selection import replace_selection

    replace_selection()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of the table, and further cases if there is `--most-cases`.

    Raises:
        pytest.UsageError: If the table names a test that its file does not have.
    """
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    files: set[str] = set()
    unknown = set(ON_OTHER_DEVICES_ONLY)
    for item in items:
        names = {item.nodeid, name_of_test(item)}
        files.add(item.nodeid.partition("::")[0])
        unknown -= names
        if names & set(ON_OTHER_DEVICES_ONLY):
            deselected.append(item)
        else:
            kept.append(item)
    most_cases = config.getoption("--most-cases")
    if most_cases is not None:
        for cases in cases_of_tests(kept).values():
            chosen = spread(len(cases), most_cases)
            deselected += [case for index, case in enumerate(cases) if index not in chosen]
    left_out = set(deselected)
    items[:] = [item for item in kept if item not in left_out]
    config.hook.pytest_deselected(items=deselected)

    # Where whole files run, each entry of theirs names a test.
    is_selection = config.option.keyword or any("::" in argument for argument in config.args)
    stale = [name for name in unknown if name.partition("::")[0] in files]
    if stale and not is_selection:
        raise pytest.UsageError(f"ON_OTHER_DEVICES_ONLY names tests that do not exist: {stale}")
