"""The start-up probe must pass here, and must notice an operation that is not canonical."""

import torch
from support.tiny import TINY

from zerogap.numerics import attention, certify

ARGUMENTS = (TINY.linear_shapes, TINY.attention_shape, TINY.vocab_size, torch.float32)


def fresh_certificate():
    certify._certify.cache_clear()
    try:
        return certify.certify(*ARGUMENTS)
    finally:
        certify._certify.cache_clear()


def test_this_machine_is_certified_for_the_tiny_model():
    certificate = fresh_certificate()
    assert certificate.failures == ()
    assert set(certificate.routes.by_shape) == set(TINY.linear_shapes)


def test_the_fingerprint_is_the_same_for_any_thread_count():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = fresh_certificate().fingerprint
        torch.set_num_threads(2)
        assert fresh_certificate().fingerprint == one
    finally:
        torch.set_num_threads(threads)


def test_the_fingerprint_holds_the_bits_that_were_computed(monkeypatch):
    before = fresh_certificate().fingerprint
    honest = certify.rms_norm
    monkeypatch.setattr(certify, "rms_norm", lambda x, w, eps: honest(x, w, eps) * (1 + 2**-20))
    assert fresh_certificate().fingerprint != before


def test_attention_whose_sum_depends_on_the_extent_is_refused(monkeypatch):
    """A row summed in one run over a short extent but in two over a long one is not canonical."""

    def adaptive(p_BRL, values_BLD):
        half = p_BRL.shape[-1] // 2
        return torch.bmm(p_BRL[:, :, :half], values_BLD[:, :half]) + torch.bmm(p_BRL[:, :, half:], values_BLD[:, half:])

    monkeypatch.setattr(attention, "weigh_values", adaptive)
    assert "attention" in fresh_certificate().failures[0]


def test_a_linear_whose_rows_depend_on_their_number_is_refused(monkeypatch):
    honest = certify.product

    def crooked(x, weight, route, *, min_rows):
        return honest(x, weight, route, min_rows=min_rows) * (1 + len(x) * 2**-20)

    monkeypatch.setattr(certify, "product", crooked)
    assert "linear" in fresh_certificate().failures[0]


def test_a_missing_blas_setting_is_named(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "AUTO")
    assert not torch.backends.mkl.is_available() or "MKL_CBWR" in fresh_certificate().failures[0]
