"""Parts that test files share; none of them imports from another one.

- `equality.assert_equal`: the one comparison of nested values, to the bit or within a tolerance.
- `one_device`: "equal to one device": `train` a network with a strategy, compare its `Run` with that `on_one_device`.
- `resumption.assert_resumes`: "saved or killed here, resumed there, equal to the undisturbed run".
- `networks`, `batches`: the networks and batches for it. `trainer_runs`: a small module, loaders, a quiet trainer.
- `trainer_runs.refuses`, `refuses_fit`: an input and the words that the message of its refusal must have.
- `pairs.pairwise`: fewer cases than a product; `quick_cases` and `all_cases`: fewer of them in the quick tests.
- `programs`, `projects`, `commands`: scripts, projects of users and the command, as in a process of their own.
- `surroundings`, `quiet`, `terminal`, `ports`, `waiting`, `elsewhere`: the process and the machine around a test.
"""
