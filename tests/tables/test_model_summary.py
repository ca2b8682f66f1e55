"""The default summary of a model: nothing is cut, and FLOPs appear where they are known."""

import torch

from tests.support.trainer_runs import Small, loader, trainer

LONG = "a_name_of_a_layer_that_is_wider_than_the_eighty_columns_which_a_pipe_seems_to_have_at_first"


def summary_of(module, capsys):
    trainer(max_steps=1, enable_model_summary=True).fit(module, loader())
    return capsys.readouterr().out


def test_names_are_whole_and_unknown_flops_are_left_out(capsys):
    module = Small()
    module.add_module(LONG, torch.nn.Linear(3, 6))
    out = summary_of(module, capsys)
    assert LONG in out
    assert "…" not in out
    assert "FLOPs" not in out
    assert "Trainable params: 27" in out


def test_known_flops_are_shown(capsys):
    class Called(Small):
        def forward(self, points):
            return self.layer(points)

    module = Called()
    module.example_input_array = torch.zeros(1, 2)
    out = summary_of(module, capsys)
    assert "FLOPs" in out
    assert "Total FLOPs: 0" not in out
