"""gpt and transformer: compared with torch's layers, attention masks, and translations token by token."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
import torch
from torch import Tensor, nn

from decentnode.errors import UsageError
from decentnode.models.attention import Attention, FeedForward
from decentnode.models.gpt import Gpt, GptConfig
from decentnode.models.transformer import DecoderLayer, Layer, Transformer, TransformerConfig, TransformerModule
from decentnode.samples import BEGIN, END, FIRST_WORD, DataSpec
from decentnode.tasks.translation import _likeliest

TEXT = DataSpec((6,), "ids", "next_token", vocabulary=9, target_shape=(6,))
PAIRS = DataSpec((7, 2), "ids", "translation", vocabulary=13, target_shape=(7,), padding=0, pairs=True)


def gpt(data: DataSpec = TEXT, **keys: Any) -> nn.Module:
    torch.manual_seed(0)
    return Gpt(GptConfig(**{"layers": 2, "width": 12, "heads": 3, **keys})).make(data)


def transformer(**keys: Any) -> TransformerModule:
    torch.manual_seed(0)
    made = Transformer(TransformerConfig(**{"layers": 2, "width": 12, "heads": 3, **keys})).make(PAIRS)
    assert isinstance(made, TransformerModule)
    return made.eval()


def sentence_pairs(count: int = 5) -> Tensor:
    """Returns pairs [count, 7, 2]: sources of 1 to 7 tokens, and targets that start with BEGIN."""
    found = torch.randint(FIRST_WORD, 13, (count, 7, 2), generator=torch.Generator().manual_seed(1))
    found[:, 0, 1] = BEGIN
    found[..., 0] = found[..., 0].where(torch.arange(7) <= torch.arange(count)[:, None] % 7, 0)
    return found


@pytest.mark.parametrize("tied, parameters", [(True, 124_439_808), (False, 124_439_808 + 50_257 * 768)])
def test_gpt2_small_has_the_published_number_of_parameters(tied: bool, parameters: int) -> None:
    data = DataSpec((1024,), "ids", "next_token", vocabulary=50_257, target_shape=(1024,))
    with torch.device("meta"):
        module = gpt(data, layers=12, width=768, heads=12, tied=tied)
    assert sum(p.numel() for p in module.parameters()) == parameters


def test_a_position_of_gpt_attends_to_earlier_positions_only() -> None:
    module = gpt()
    tokens = torch.randint(0, 9, (3, 6))
    outputs, changed = module(tokens), tokens.clone()
    changed[:, 4] = (tokens[:, 4] + 1) % 9
    assert outputs.shape == (3, 6, 9) and torch.allclose(module(changed)[:, :4], outputs[:, :4], atol=1e-6)
    assert not torch.allclose(module(changed)[:, 4:], outputs[:, 4:], atol=1e-3)
    assert torch.allclose(module(tokens[:, :3]), outputs[:, :3], atol=1e-6), "rows may be shorter"
    last = gpt(DataSpec((6,), "ids", "next_token", vocabulary=9))
    assert torch.allclose(last(tokens), outputs[:, -1], atol=1e-6)


def test_gpt_starts_near_uniform_predictions_and_scales_residual_weights_by_depth() -> None:
    loss = nn.CrossEntropyLoss()(gpt(layers=12, width=48)(torch.zeros(4, 6, dtype=torch.int64)).flatten(0, 1),
                                 torch.arange(24) % 9)  # fmt: skip
    assert loss.item() == pytest.approx(2.197, abs=0.05)
    deep = gpt(layers=50, width=64, heads=4)
    assert deep.get_parameter("layers.0.linear.3.weight").detach().std() == pytest.approx(0.002, rel=0.05)
    assert deep.get_parameter("layers.7.attention.output.weight").detach().std() == pytest.approx(0.002, rel=0.05)
    assert deep.get_parameter("layers.7.attention.query.weight").detach().std() == pytest.approx(0.02, rel=0.05)


def test_gpt_may_have_more_positions_than_the_data_but_not_fewer() -> None:
    assert gpt(places=9).get_parameter("places.weight").shape == (9, 12)
    with pytest.raises(UsageError, match=r"gpt has 5 places \(model.places\), the data has sequences of 6"):
        gpt(places=5)


@pytest.mark.parametrize("config", [GptConfig, TransformerConfig])
def test_widths_that_heads_do_not_divide_are_refused(config: Any) -> None:
    """The message follows the section's name, so it must not repeat it."""
    with pytest.raises(pydantic.ValidationError,
                       match="error, must have a width that is a multiple of heads, got width 10 and heads 3"):
        config(width=10, heads=3)


def test_the_base_transformer_has_the_number_of_parameters_of_the_paper() -> None:
    data = DataSpec((64, 2), "ids", "translation", vocabulary=37_000, target_shape=(64,), padding=0, pairs=True)
    with torch.device("meta"):
        module = Transformer(TransformerConfig(layers=6, width=512, heads=8, norm="after")).make(data)
    assert sum(p.numel() for p in module.parameters()) == 63_082_496  # 65 million there, with some more tokens


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm", ["before", "after"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_transformer_equals_that_of_torch(norm: str, tied: bool) -> None:
    module = transformer(norm=norm, tied=tied)
    theirs = nn.Transformer(12, 3, 2, 2, 48, 0.1, batch_first=True, norm_first=norm == "before").eval()
    for stacks, mine in ((theirs.encoder, module.encoder), (theirs.decoder, module.decoder)):
        for torchs, layer in zip(stacks.layers, mine, strict=True):
            copy_layer(torchs, layer)
        stacks.norm = None if norm == "after" else stacks.norm
    given = sentence_pairs()
    source, target = given.unbind(-1)
    embedded = [module._embed(embedding, tokens) for embedding, tokens in
                ((module.embedding, source), (module.target_embedding or module.embedding, target))]  # fmt: skip
    later = torch.triu(torch.ones(7, 7, dtype=torch.bool), 1)
    states = theirs(*embedded, tgt_mask=later, src_key_padding_mask=source == 0, memory_key_padding_mask=source == 0)
    last = module.embedding.weight if module.output is None else module.output.weight
    assert torch.allclose(module(given), states @ last.T, atol=1e-5)


def copy_layer(theirs: Any, mine: Layer) -> None:
    """Copies the weights of one of our layers into a layer of torch."""
    copy_attention(theirs.self_attn, mine.attention)
    if isinstance(mine, DecoderLayer):
        copy_attention(theirs.multihead_attn, mine.attended)
    first, last = (mine.linear[place] for place in (0, 3))
    theirs.linear1.load_state_dict(first.state_dict())
    theirs.linear2.load_state_dict(last.state_dict())


def copy_attention(theirs: nn.MultiheadAttention, mine: Attention) -> None:
    theirs.in_proj_weight.data = torch.cat([mine.query.weight, mine.memory.weight]).detach()
    theirs.in_proj_bias.data = torch.cat([mine.query.bias, mine.memory.bias]).detach()
    theirs.out_proj.load_state_dict(mine.output.state_dict())


def test_a_position_attends_to_the_unpadded_source_and_to_earlier_targets() -> None:
    module, given = transformer(), sentence_pairs()
    outputs = module(given)
    longer = torch.cat([given, torch.zeros(5, 3, 2, dtype=torch.int64)], 1)
    assert torch.allclose(module(longer)[:, :7], outputs, atol=1e-5)
    later, earlier = given.clone(), given.clone()
    later[:, 4, 1] = (later[:, 4, 1] + 1) % 13
    assert torch.allclose(module(later)[:, :4], outputs[:, :4], atol=1e-5)
    assert not torch.allclose(module(later)[:, 4:], outputs[:, 4:], atol=1e-3)
    earlier[:, 0, 0] = (earlier[:, 0, 0] - FIRST_WORD + 1) % 9 + FIRST_WORD
    assert not torch.allclose(module(earlier)[:, 0], outputs[:, 0], atol=1e-3)


@pytest.mark.parametrize("norm", ["before", "after"])
def test_cached_translation_equals_greedy_decoding(norm: str) -> None:
    module, given = transformer(norm=norm, tied=False), sentence_pairs(12)  # tied, it repeats the token before
    with torch.no_grad():
        found, expected = module.translate(given[..., 0], 9), _likeliest(module, given, 9)
    for mine, theirs in zip(found.tolist(), expected.tolist(), strict=True):
        end = theirs.index(END) + 1 if END in theirs else len(mine)
        assert mine[:end] == theirs[:end]
    assert len({tuple(each) for each in found.tolist()}) > 3


def test_feed_forward_layers_have_the_given_activation() -> None:
    assert isinstance(FeedForward(4, 6, "relu", 0.1)[1], nn.ReLU) and FeedForward(4, 6, "gelu", 0)[0].out_features == 6
