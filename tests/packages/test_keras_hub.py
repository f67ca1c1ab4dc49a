"""KerasHub: tiny models of 13 architectures, and a preset written and read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers
from tests.packages.parity import require_same

import replicax as rx

models: Any = pytest.importorskip(
    "keras_hub", reason="KerasHub is not installed: make test-packages"
).models

pytestmark = [pytest.mark.packages, pytest.mark.filterwarnings("default")]

ROWS = 10
Y = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
SIZES: dict[str, Any] = {"vocabulary_size": 20, "num_layers": 1, "hidden_dim": 8}
TEXT: dict[str, Any] = {**SIZES, "num_heads": 2, "intermediate_dim": 16, "dropout": 0.0}
DECODER: dict[str, Any] = {
    **SIZES,
    "num_query_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_dim": 16,
}

BACKBONES: dict[str, Callable[[], Any]] = {
    "BERT": lambda: models.BertBackbone(**TEXT, max_sequence_length=6),
    "RoBERTa": lambda: models.RobertaBackbone(**TEXT, max_sequence_length=6),
    "DistilBERT": lambda: models.DistilBertBackbone(**TEXT, max_sequence_length=6),
    "ALBERT": lambda: models.AlbertBackbone(
        **TEXT, embedding_dim=4, max_sequence_length=6
    ),
    "GPT-2": lambda: models.GPT2Backbone(**TEXT, max_sequence_length=6),
    "OPT": lambda: models.OPTBackbone(**TEXT, max_sequence_length=6),
    "BLOOM": lambda: models.BloomBackbone(**TEXT),
    "Gemma": lambda: models.GemmaBackbone(**DECODER, head_dim=4),
    "Llama": lambda: models.LlamaBackbone(**DECODER),
    "Mistral": lambda: models.MistralBackbone(**DECODER),
    "ViT": lambda: models.ViTBackbone(
        image_shape=(8, 8, 3),
        patch_size=(4, 4),
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        mlp_dim=16,
    ),
    "ResNet": lambda: models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[1],
        stackwise_num_strides=[1],
        block_type="basic_block",
        image_shape=(8, 8, 3),
    ),
    "Whisper": lambda: models.WhisperBackbone(
        **TEXT, num_mels=4, max_encoder_sequence_length=8, max_decoder_sequence_length=6
    ),
}


def rows_of(backbone: Any) -> Any:
    """Rows for the inputs of a backbone, equal at each call."""
    rng = np.random.default_rng(1)
    inputs, rows = backbone.input, {}
    for name, spec in (inputs if isinstance(inputs, dict) else {"": inputs}).items():
        shape = (ROWS, *(6 if size is None else size for size in spec.shape[1:]))
        if "mask" in name:
            rows[name] = np.ones(shape, "int32")
        elif "ids" in name:
            rows[name] = rng.integers(0, 2 if "segment" in name else 20, shape)
        else:
            rows[name] = rng.normal(size=shape).astype("float32")
    return rows if isinstance(inputs, dict) else rows[""]


@pytest.mark.parametrize("strategy", ["mirrored", "fully sharded", "model parallel"])
@pytest.mark.parametrize("name", BACKBONES)
def test_models(name: str, strategy: str, tmp_path: Path) -> None:
    def train() -> keras.Model:
        backbone = BACKBONES[name]()
        weights = backbone.get_weights()
        backbone.save_to_preset(str(tmp_path))
        backbone = type(backbone).from_preset(str(tmp_path))
        for loaded, saved in zip(backbone.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(loaded, saved)
        for layer in backbone._flatten_layers():
            if isinstance(layer, layers.BatchNormalization):
                layer.synchronized = rx.has_strategy()
        outputs = backbone.output
        if isinstance(outputs, dict):
            outputs = next(x for key, x in outputs.items() if "sequence" in key)
        pooled = keras.ops.mean(outputs, tuple(range(1, len(outputs.shape) - 1)))
        model = keras.Model(backbone.input, layers.Dense(2)(pooled))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        # The last of three batches has two rows, which fewer replicas hold.
        rows = rows_of(backbone)
        model.fit(rows, Y, batch_size=4, epochs=1, shuffle=False, verbose=0)
        return model

    # Attention and normalization sum in other orders on other devices.
    require_same(train, strategy, rtol=1e-4)
