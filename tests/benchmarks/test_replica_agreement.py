"""A sample of the planted divergences and of the healthy programs, and that the campaign notices what is wrong."""

import random
from pathlib import Path

import pytest

from tests.support.benchmarks import Modules, Scripts

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = 4


@pytest.fixture
def scripts_of_it(scripts: Scripts) -> Modules:
    """The benchmark's scripts, by name."""
    return scripts("replica_agreement", "base", "planted", "healthy", "costs", "main")


@pytest.mark.thorough
@pytest.mark.parametrize("count", [QUICK, pytest.param(1000, marks=pytest.mark.slow)], ids=["sample", "all"])
def test_programs(count: int, scripts_of_it: Modules, tmp_path: Path) -> None:
    """Drawn anew each time; the seed is printed."""
    print("seed:", seed := random.SystemRandom().randrange(10**6))
    draw = random.Random(seed)
    main = scripts_of_it["main"]
    faults, healthy = scripts_of_it["planted"].FAULTS, scripts_of_it["healthy"].HEALTHY
    assert len(faults) >= 20
    assert len(healthy) >= 50
    for programs, judge in ((faults, main.named), (healthy, main.alarm)):
        for number, name in enumerate(draw.sample(sorted(programs), min(count, len(programs)))):
            folder = tmp_path / f"{len(programs)}-{number}"
            folder.mkdir()
            assert not judge(programs[name], folder), name


@pytest.mark.thorough
def test_what_is_wrong_is_noticed(scripts_of_it: Modules, tmp_path: Path) -> None:
    main, faults = scripts_of_it["main"], scripts_of_it["planted"].FAULTS
    fault = faults["one bit of one element"]
    other = type(fault)(fault.run, "net.0.weight")
    assert "net.2.weight" in main.named(other, tmp_path)
    assert "Replicas differ" in main.alarm(fault.run, tmp_path)
    nothing = type(fault)(scripts_of_it["healthy"].HEALTHY["dropout"])
    assert main.named(nothing, tmp_path) == "no error"
