"""Made data in the files of data sets that the tests of a library would download."""

import zipfile
from pathlib import Path

ROWS_OF_HOUSES = 20640
ROWS_OF_FORESTS = 12000
ROWS_OF_ROOMS = 800


def write_tables(folder: Path) -> None:
    """Write the three tables of pytorch-tabular's tests: houses and forests as scikit-learn caches them, and rooms.

    Args:
        folder: The sources of pytorch-tabular.
    """
    import joblib
    import numpy

    draw = numpy.random.default_rng(1)
    houses = draw.uniform(1.0, 50.0, (ROWS_OF_HOUSES, 9))
    forests = draw.integers(0, 200, (ROWS_OF_FORESTS, 54)).astype(float)
    kinds = draw.integers(1, 8, ROWS_OF_FORESTS)
    (folder / "data" / "covertype").mkdir(parents=True, exist_ok=True)
    joblib.dump(houses, folder / "data" / "cal_housing_py3.pkz")
    joblib.dump(forests, folder / "data" / "covertype" / "samples_py3")
    joblib.dump(kinds, folder / "data" / "covertype" / "targets_py3")
    archive = folder / "tests" / ".datasets" / "occupancy_data.zip"
    archive.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(archive, "w") as file:
        for name in ("datatraining", "datatest", "datatest2"):
            rows = ['"date","Temperature","Humidity","Light","CO2","HumidityRatio","Occupancy"']
            for number in range(ROWS_OF_ROOMS):
                day, minute = divmod(number, 1440)
                date = f"2015-02-{4 + day:02d} {minute // 60:02d}:{minute % 60:02d}:00"
                values = ",".join(f"{value:.3f}" for value in draw.uniform(0.0, 30.0, 5))
                rows.append(f'"{number + 1}","{date}",{values},{number % 2}')
            file.writestr(f"{name}.txt", "\n".join(rows) + "\n")
