"""Models of timm, torchvision, diffusers, torch itself and torch_geometric."""

from collections.abc import Callable
from functools import partial
from typing import Any

import networks
import torch
from catalogue import Model
from torch import Generator, Tensor, nn

__all__ = ["diffusers_models", "geometric_models", "timm_models", "torch_models", "torchvision_models"]

CLASSES, WORDS, NODES = 10, 20, 6
SIDE = 64  # pixels of an image
IMAGES = (2, 2, 3)
"""Samples of the batches of images: layers of these models cannot all be small.

The cut is predicted for the first batch, and the stages' costs are measured in the second.
"""
IMAGES_WITHOUT_SINGLES = (4, 4, 5)
"""The same, with more than one sample in each micro-batch: BatchNorm of torch is wrong for one; see README."""
WITHOUT_SINGLES = {
    *(("timm", name) for name in ("levit_128s", "tiny_vit_5m_224", "xcit_nano_12_p16_224")),
    *(("timm", name) for name in ("efficientnet_b0", "rexnet_100")),
    ("torchvision", "regnet_y_400mf"),
}

TIMM = (
    *("resnet18", "resnet50", "efficientnet_b0", "convnext_atto", "mobilenetv3_small_050", "regnetx_002"),
    *("densenet121", "crossvit_tiny_240", "poolformer_s12", "ghostnet_050", "edgenext_xx_small", "pvt_v2_b0"),
    *("hrnet_w18_small", "dla34", "dpn48b", "nfnet_f0", "rexnet_100", "focalnet_tiny_srf", "davit_tiny"),
    *("tiny_vit_5m_224", "inception_v3"),
)
TIMM_WITH_SIZE = (
    *("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "mixer_s32_224", "deit_tiny_patch16_224"),
    *("levit_128s", "maxvit_rmlp_pico_rw_256", "coat_tiny", "cait_xxs24_224", "xcit_nano_12_p16_224"),
    *("mobilevit_xxs", "tnt_s_patch16_224", "twins_svt_small", "visformer_tiny", "volo_d1_224"),
    *("eva02_tiny_patch14_224", "beit_base_patch16_224"),
)
"""Models that are built for one size of images."""

TORCHVISION = (
    *("resnet18", "vgg11", "alexnet", "densenet121", "googlenet", "inception_v3", "mobilenet_v2"),
    *("mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_0", "efficientnet_b0", "convnext_tiny"),
    *("VisionTransformer", "swin_t", "regnet_y_400mf", "mnasnet0_5", "MaxVit"),
)

SIDES = {"inception_v3": 96, "eva02_tiny_patch14_224": 56}
"""Pixels of the images of models that need another number."""

TIMM_OPTIONS = {"beit_base_patch16_224": {"depth": 4, "embed_dim": 96, "num_heads": 4}}
TORCHVISION_OPTIONS: dict[str, dict[str, Any]] = {
    "googlenet": {"init_weights": False},
    "inception_v3": {"aux_logits": False},
    "MaxVit": {
        "input_size": (SIDE, SIDE),
        "stem_channels": 8,
        "partition_size": 2,
        "block_channels": [8, 16, 16],
        "block_layers": [1, 2, 1],
        "head_dim": 8,
        "stochastic_depth_prob": 0.0,
    },
    "VisionTransformer": {
        "image_size": SIDE,
        "patch_size": 16,
        "num_layers": 4,
        "num_heads": 4,
        "hidden_dim": 32,
        "mlp_dim": 64,
    },
}
"""Further options of models, most of which make them small."""

SHORT_STEPS = {
    ("timm", "efficientnet_b0"): 1e-7,
    ("timm", "inception_v3"): 1e-5,
    ("torchvision", "efficientnet_b0"): 1e-5,
    ("torchvision", "inception_v3"): 1e-5,
}
"""The first steps of models whose loss grows without bound, or multiplies rounding, after longer ones."""

UNET = {
    "sample_size": 16,
    "in_channels": 3,
    "out_channels": 3,
    "block_out_channels": (32, 32),
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
"""Sizes of both kinds of UNet of diffusers."""


def timm_models() -> list[Model]:
    """Models of images."""
    return [_of_images(name, "timm", make_timm) for name in (*TIMM, *TIMM_WITH_SIZE)]


def make_timm(name: str) -> nn.Module:
    import timm

    options = dict(TIMM_OPTIONS.get(name, {}))
    if name in TIMM_WITH_SIZE:
        options["img_size"] = SIDES.get(name, SIDE)
    model: nn.Module = timm.create_model(name, num_classes=CLASSES, **options)
    return model


def torchvision_models() -> list[Model]:
    """Models of images."""
    return [_of_images(name, "torchvision", make_torchvision) for name in TORCHVISION]


def make_torchvision(name: str) -> nn.Module:
    import torchvision.models

    model: nn.Module = getattr(torchvision.models, name)(num_classes=CLASSES, **TORCHVISION_OPTIONS.get(name, {}))
    return model


def _of_images(name: str, library: str, make: Callable[[str], nn.Module]) -> Model:
    batch = partial(image, SIDES.get(name, SIDE))
    first_step = SHORT_STEPS.get((library, name), 1e-3)
    sizes = IMAGES_WITHOUT_SINGLES if (library, name) in WITHOUT_SINGLES else IMAGES
    return Model(name, library, partial(make, name), batch, sizes=sizes, first_step=first_step)


def image(side: int, count: int, generator: Generator) -> dict[str, Tensor]:
    return {"x": _noise(generator, count, 3, side, side)}


def diffusers_models() -> list[Model]:
    """Networks that remove noise."""
    return [
        Model("UNet2DModel, tensor of time steps", "diffusers", make_unet, noisy_image),
        Model("UNet2DModel, integer time step", "diffusers", make_unet, noise_alone, constants={"timestep": 5}),
        Model("UNet2DConditionModel", "diffusers", make_text_unet, noisy_image_with_text),
        Model("DiTTransformer2DModel", "diffusers", make_dit, latents),
    ]


def make_unet() -> nn.Module:
    import diffusers

    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model: nn.Module = diffusers.UNet2DModel(**UNET, **blocks)
    return model


def make_text_unet() -> nn.Module:
    import diffusers

    model: nn.Module = diffusers.UNet2DConditionModel(
        **UNET,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=8,
    )
    return model


def make_dit() -> nn.Module:
    import diffusers

    model: nn.Module = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )
    return model


def noise_alone(count: int, generator: Generator) -> dict[str, Tensor]:
    return {"sample": _noise(generator, count, 3, 16, 16)}


def noisy_image(count: int, generator: Generator) -> dict[str, Tensor]:
    return {**noise_alone(count, generator), "timestep": torch.randint(10, (count,), generator=generator)}


def noisy_image_with_text(count: int, generator: Generator) -> dict[str, Tensor]:
    return {**noisy_image(count, generator), "encoder_hidden_states": _noise(generator, count, 5, 16)}


def latents(count: int, generator: Generator) -> dict[str, Tensor]:
    return {
        "hidden_states": _noise(generator, count, 4, 8, 8),
        "timestep": torch.randint(10, (count,), generator=generator),
        "class_labels": torch.randint(10, (count,), generator=generator),
    }


def torch_models() -> list[Model]:
    """Networks of torch's own modules."""
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    return [
        Model("nn.Transformer, causal mask", "torch", make_transformer, two_texts, constants={"tgt_mask": mask}),
        Model("GRU seq2seq, packs in its forward", "torch", networks.PackingSeq2Seq, sentences),
        Model("GRU seq2seq, packs in a submodule", "torch", networks.Seq2Seq, sentences),
    ]


def make_transformer() -> nn.Module:
    return nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)


def two_texts(count: int, generator: Generator) -> dict[str, Tensor]:
    return {"src": _noise(generator, count, 6, 16), "tgt": _noise(generator, count, 5, 16)}


def sentences(count: int, generator: Generator) -> dict[str, Tensor]:
    return {
        "source": torch.randint(WORDS, (count, 7), generator=generator),
        "lengths": torch.tensor([7, 3, 5, 2])[:count],
        "target": torch.randint(WORDS, (count, 5), generator=generator),
    }


def geometric_models() -> list[Model]:
    """Networks of graphs."""
    return [Model("GCN, split_batch", "torch_geometric", make_gcn, graphs, graphs=True)]


def make_gcn() -> nn.Module:
    from torch_geometric.nn import GCN

    model: nn.Module = GCN(in_channels=8, hidden_channels=16, num_layers=4, out_channels=4, dropout=0.0)
    return model


def graphs(count: int, generator: Generator) -> Any:
    """A batch of graphs with equally many nodes, each a ring."""
    from torch_geometric.data import Batch, Data

    nodes = torch.arange(NODES)
    following = nodes.roll(-1)
    edges = torch.stack([torch.cat([nodes, following]), torch.cat([following, nodes])])
    return Batch.from_data_list([Data(x=_noise(generator, NODES, 8), edge_index=edges) for _ in range(count)])


def _noise(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=generator)
