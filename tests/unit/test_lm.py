# SPDX-License-Identifier: Apache-2.0
"""The language model of the examples: speculation changes no byte, splitting changes no bit, training has its math."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from examples.lm import decoder as decoding
from examples.lm import model as lm
from examples.lm.decoder import SLOT, Decoder, project
from examples.lm.generate import PROMPT, Drafter, generate, greedy, sampled

ROOT = Path(__file__).parent.parent.parent
TEXT = PROMPT.encode()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model():
    return lm.LM.load()


def bits(tensor):
    return tensor.view(torch.int32)


def test_the_weights_are_small_and_say_what_they_learned():
    assert lm.WEIGHTS.stat().st_size < 4_000_000
    with safe_open(lm.WEIGHTS, framework="pt") as file:
        about = file.metadata()
    assert "standard library" in about["text"] and "PSF" in about["licence"]
    assert float(about["held_out_loss"]) < 2.5


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_speculation_changes_no_byte_and_no_state(model, name):
    choose = greedy if name == "greedy" else sampled(3)
    plain = Decoder(model, 1)
    expected = generate(plain, TEXT, 40, choose)
    assert len(expected.text) == 40 and expected.steps == 40
    for window in (4, 7):
        decoder = Decoder(model, window)
        got = generate(decoder, TEXT, 40, choose)
        assert got.text == expected.text
        assert got.steps < 40
        for one, other in zip(plain.layers, decoder.layers, strict=True):
            assert torch.equal(bits(one.state[SLOT]), bits(other.state[SLOT]))


def test_rejected_drafts_leave_no_trace(model):
    one, other = Decoder(model, 1), Decoder(model, 4)
    for byte in TEXT:
        expected = one.verify([byte])
        one.commit(1)
        got = other.verify([byte, 0, 255, 7])
        other.commit(1)
        assert torch.equal(bits(expected[0]), bits(got[0]))


def test_training_and_decoding_give_the_same_logits(model):
    text = list(TEXT * 2)
    expected = model(torch.tensor([text]))[0]
    decoder, rows = Decoder(model, 5), []
    for start in range(0, len(text), 5):
        window = text[start : start + 5]
        rows.append(decoder.verify(window))
        decoder.commit(len(window))
    difference = (torch.cat(rows) - expected).abs()
    # The decoder rounds activations to bf16 where the kernels do.
    assert difference.max() < 0.5 and difference.mean() < 0.05


def test_the_chunked_rule_is_the_rule():
    generator = torch.Generator().manual_seed(0)
    heads, length, dim = 2, 2 * lm.CHUNK, 8
    q, k, v = torch.randn(3, 1, heads, length, dim, generator=generator)
    log_decay = lm.LOWER_BOUND * torch.rand(1, heads, length, dim, generator=generator)
    beta = torch.rand(1, heads, length, generator=generator)
    q, k = lm.unit(q), lm.unit(k)
    got = lm.delta_rule(q, k, v, log_decay, beta)[0]
    state = torch.zeros(heads, dim, dim)
    for t in range(length):
        at = (0, slice(None), t)
        arguments = (q[at], k[at], v[at], log_decay[at].exp(), beta[at])
        state, _, o = decoding.reference.delta_rule(state, *arguments)
        torch.testing.assert_close(got[:, t], o, rtol=1e-4, atol=1e-5)


def test_projections_depend_on_their_row_and_column_alone():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 64, generator=generator), torch.randn(64, 40, generator=generator)
    whole = project(x, weight)
    torch.testing.assert_close(whole, x @ weight)
    for row in range(5):
        assert torch.equal(project(x[row : row + 1], weight[:, 8:24].contiguous())[0], whole[row, 8:24])


def test_the_drafter_repeats_the_text():
    drafter, text = Drafter(), bytearray()
    for byte in b"one two three, one tw":
        text.append(byte)
        drafter.learn(text)
    assert bytes(drafter.draft(text, 6)) == b"o thre"
    assert drafter.draft(bytearray(b"unknown"), 6) == []


def test_heads_must_divide(model):
    with pytest.raises(ValueError, match="2 heads cannot be split over 3 ranks"):
        Decoder(model, 4, ranks=3)


def test_tensor_parallel():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "examples.lm.tensor_parallel"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the same bytes and states as one rank's" in done.stdout
