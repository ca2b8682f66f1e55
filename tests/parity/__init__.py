"""The same programs under Lightning's Trainer and under Equipoise's, compared to the bit.

    harness.py      a case, how it is run on both sides, and the test made of cases
    recording.py    writes down every hook with its arguments and the state of the run
    outputs.py      reads the folder a run leaves behind
    resumption.py   stops a run at a checkpoint and continues with either trainer
    modules.py, data.py   the networks and loaders that most cases use

To add a case, add a `Case` to the list of the file it belongs to. `proves` should say what makes it what its name
promises.

Where Equipoise differs on purpose, it is held against what it should be instead:

- A short or uneven accumulation window, or one with a batch that returned None, has the gradient of its union
  (`tests/trainer/optimization/test_accumulation.py`).
- A run resumed from one of its own checkpoints continues exactly: within an epoch with any loader, with every
  generator, with the epoch's sums and with schedulers that watch a value (`resuming`,
  `tests/trainer/loops/test_resumption.py`).
- Contradictory arguments are refused before training, by an error of its own (`refuses`).
- An interrupt by the keyboard is handed on as such; Lightning exits the process (`runs/test_stopping.py`).
"""
