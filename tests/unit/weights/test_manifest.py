"""weights/manifest.py: what a set of weights is, and digests of bytes."""

from __future__ import annotations

import pytest
import torch
from support.engine_double import flip_one_byte, odd_tensors
from support.tiny import TINY, TINY_UNTIED, tiny_decoder

from zerogap.errors import ManifestMismatch
from zerogap.weights.manifest import (
    Manifest,
    combined_digest,
    differing_names,
    dtype_of,
    name_some,
    tensor_digest,
    tensor_digests,
)
from zerogap.wire.tensors import TensorSpec


def test_the_order_of_names_does_not_change_a_manifest():
    tensors = odd_tensors()
    assert Manifest.of(tensors).digest == Manifest.of(dict(reversed(tensors.items()))).digest


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.zeros(2, 3), "c": torch.zeros(4)},
        {"a": torch.zeros(3, 2), "b": torch.zeros(4)},
        {"a": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(4)},
        {"a": torch.zeros(2, 3)},
        {"a": torch.zeros(2, 3), "b": torch.zeros(4), "c": torch.zeros(0)},
        {"a": torch.zeros(6), "b": torch.zeros(4)},
    ],
    ids=["renamed", "transposed", "other dtype", "missing", "extra", "flattened"],
)
def test_another_name_shape_or_dtype_changes_a_manifest(changed):
    base = Manifest.of({"a": torch.zeros(2, 3), "b": torch.zeros(4)})
    other = Manifest.of(changed)
    assert base.digest != other.digest
    with pytest.raises(ManifestMismatch):
        base.check_equal(other)


def test_a_mismatch_names_what_is_missing_extra_and_changed():
    trainer = Manifest.of({"same": torch.zeros(1), "gone": torch.zeros(1), "shape": torch.zeros(2, 3)})
    engine = Manifest.of({"same": torch.zeros(1), "new": torch.zeros(1), "shape": torch.zeros(3, 2)})
    with pytest.raises(ManifestMismatch) as caught:
        trainer.check_equal(engine)
    assert caught.value.details == {"missing": ["gone"], "extra": ["new"], "changed": ["shape"]}
    for text in ("lacks gone", "lacks new", "float32[2, 3]", "float32[3, 2]"):
        assert text in caught.value.what


def test_a_head_on_one_side_only_is_explained_by_tying():
    """C1: one side ties the head, the other does not."""
    tied, untied = (Manifest.of(tiny_decoder(config).hf_tensors()) for config in (TINY, TINY_UNTIED))
    with pytest.raises(ManifestMismatch, match=r"lm_head\.weight") as caught:
        untied.check_equal(tied)
    assert "tie_word_embeddings" in caught.value.remedy


def test_a_tied_weight_under_two_names_is_refused():
    """C1: a tied matrix travels once."""
    tensors = tiny_decoder(TINY).hf_tensors()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    with pytest.raises(ManifestMismatch, match=r"model\.embed_tokens\.weight and lm_head\.weight are one tensor"):
        Manifest.of(tensors)


def test_views_into_one_parameter_and_empty_tensors_are_no_aliases():
    fused = torch.zeros(4, 2)
    Manifest.of({"q": fused[:2], "k": fused[2:], "all": fused, "e1": torch.empty(0), "e2": torch.empty(0)})


def test_a_name_listed_twice_is_refused():
    spec = TensorSpec(name="a", dtype="float32", shape=(1,))
    with pytest.raises(ManifestMismatch, match="listed twice: a"):
        Manifest.from_specs([spec, spec])


def test_a_dtype_that_torch_lacks_is_refused():
    with pytest.raises(ManifestMismatch, match="float3"):
        dtype_of("float3")
    with pytest.raises(ManifestMismatch, match="save"):
        dtype_of("save")


@pytest.mark.parametrize("name", [n for n, t in odd_tensors().items() if t.numel()])
def test_every_flipped_byte_changes_the_digest_and_is_named(name):
    """C24: the tensor's name comes out."""
    tensors = {k: v.contiguous().clone() for k, v in odd_tensors().items()}
    before = tensor_digests(tensors)
    for position in range(tensors[name].nbytes):
        if tensors[name].dtype is torch.bool and position > 0:
            continue
        flip_one_byte(tensors[name], position)
        after = tensor_digests(tensors)
        assert differing_names(before, after) == [name]
        assert combined_digest(before) != combined_digest(after)
        flip_one_byte(tensors[name], position)


def test_a_digest_is_of_the_elements_in_logical_order_whatever_the_strides():
    for tensor in odd_tensors().values():
        assert tensor_digest(tensor) == tensor_digest(tensor.contiguous())
    plain = torch.arange(6.0).view(2, 3)
    assert tensor_digest(plain) != tensor_digest(plain.t())


def test_a_missing_name_counts_as_a_difference():
    assert differing_names({"a": "1", "b": "2"}, {"a": "1"}) == ["b"]
    assert differing_names({"a": "1"}, {"a": "1", "b": "2"}) == ["b"]


def test_a_long_list_of_names_is_cut_and_counted():
    assert name_some(f"n{i}" for i in range(11)).endswith("n7 and 3 more")
