"""`run.json`, which a run leaves beside its report for programs: state, curves, times, and what was run."""
