"""Checkpoints to and from transformers and torch's DCP: the same logits, the same bits, a sentence for what is not."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.numpy import load_file
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from checkpointing.layout import Layout
from checkpointing.publish import list_checkpoints
from checkpointing.rewrite import WholeTensors
from checkpointing.schema import Schema
from orchestrator.cli import main
from orchestrator.config import JobConfig
from orchestrator.own_model import find_build
from orchestrator.runfolder import RunFolder
from tests.checkpointing.node_keepers import Reference, save_checkpoint
from workers.config import DecoderConfig
from workers.models.decoder import Decoder
from workers.models.spec import describe
from workers.optimizer import build_optimizer
from workers.program import Program

VOCAB, SEQ = 300, 16
MODEL = DecoderConfig(dim=32, num_layers=3, num_heads=4, num_kv_heads=2, ffn_dim=48, rope_theta=5000.0, norm_eps=1e-5)


def job(folder: Path, name: str) -> JobConfig:
    return JobConfig.from_dict(
        {
            "run": {"name": name, "storage_path": str(folder)},
            "scaling": {"num_workers": 1},
            "model": MODEL.model_dump(),
            "data": {"vocab_size": VOCAB, "seq_len": SEQ},
            "training": {"max_steps": 5},
        }
    )


def job_file(folder: Path, name: str, **changes: Any) -> str:
    config = job(folder, name).with_overrides([f"{key}={value}" for key, value in changes.items()])
    (folder / f"{name}.yaml").write_text(config.to_yaml())
    return str(folder / f"{name}.yaml")


def schema() -> Schema:
    config = job(Path(), "x")
    return describe(Program(MODEL, config.optimizer, config.training, VOCAB, SEQ))


def random_state(seed: int) -> Reference:
    rng = np.random.default_rng(seed)
    return {
        spec.name: (rng.standard_normal(spec.shape) * 0.1).astype(spec.dtype).reshape(spec.shape)
        for spec in schema().tensors
    }


def decoder(state: Reference) -> Decoder:
    model = Decoder(MODEL, VOCAB, range(MODEL.num_layers))
    model.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in state.items() if "/" not in name})
    return model


def our_logits(state: Reference) -> torch.Tensor:
    positions = torch.arange(SEQ).expand(2, SEQ)
    return decoder(state)(tokens(), positions, torch.zeros_like(positions)).detach()


def tokens() -> torch.Tensor:
    return torch.randint(VOCAB, (2, SEQ), generator=torch.Generator().manual_seed(0))


def imported(folder: Path, name: str) -> Reference:
    (checkpoint,) = list_checkpoints(str(folder / name / "checkpoints"))
    whole = WholeTensors(checkpoint)
    return {tensor: whole.read(tensor) for tensor in whole.specs}


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Reference]:
    """A run's checkpoint, written by several nodes under another layout, and exported."""
    run = RunFolder(str(tmp_path), "run")
    run.acquire(job(tmp_path, "run"))
    run.keep_text("tokenizer.json", lambda: "{}")
    run.finish("stopped")
    state = random_state(1)
    save_checkpoint(run.location("checkpoints"), 7, Layout.parse("dp2·tp2·pp3"), "abc", schema(), state)
    assert main(["checkpoint", "export", f"{run.url}@7", str(tmp_path / "exported")]) == 0
    return tmp_path / "exported", state


def test_transformers_computes_the_same_logits(exported: tuple[Path, Reference]) -> None:
    folder, state = exported
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "LlamaForCausalLM" and model.dtype == torch.float32
    torch.testing.assert_close(model(tokens()).logits.detach(), our_logits(state), rtol=1e-5, atol=1e-5)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in model.parameters())
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    assert (folder / "tokenizer.json").read_text() == "{}"


def test_what_was_exported_comes_back_bit_by_bit(exported: tuple[Path, Reference], tmp_path: Path) -> None:
    folder, state = exported
    assert main(["checkpoint", "import", str(folder), job_file(tmp_path, "back")]) == 0
    for name, array in imported(tmp_path, "back").items():
        expected = np.zeros_like(state[name]) if "/" in name else state[name]
        assert array.tobytes() == expected.tobytes(), name


@pytest.mark.parametrize("tied", [False, True])
def test_a_llama_in_bfloat16_is_imported(tmp_path: Path, tied: bool) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=MODEL.dim,
        intermediate_size=MODEL.ffn_dim,
        num_hidden_layers=MODEL.num_layers,
        num_attention_heads=MODEL.num_heads,
        num_key_value_heads=MODEL.num_kv_heads,
        rope_parameters={"rope_type": "default", "rope_theta": MODEL.rope_theta},
        rms_norm_eps=MODEL.norm_eps,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    assert (tmp_path / "llama" / "model.safetensors.index.json").exists()
    assert main(["checkpoint", "import", str(tmp_path / "llama"), job_file(tmp_path, "new")]) == 0
    logits = our_logits(imported(tmp_path, "new"))
    theirs = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "llama", dtype=torch.float32)
    torch.testing.assert_close(logits, theirs(tokens()).logits.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_dcp_checkpoint_is_imported_with_its_optimizer(tmp_path: Path, prefix: str) -> None:
    config, state = job(tmp_path, "x"), random_state(5)
    model = decoder(state)
    optimizer = build_optimizer(config.optimizer, model.parameters())
    model(tokens(), torch.arange(SEQ).expand(2, SEQ), torch.zeros(2, SEQ, dtype=torch.int64)).sum().backward()
    optimizer.step()
    moments = {
        f"optimizer.state.{prefix}{name}.{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    parameters = {prefix + name: p.detach() for name, p in model.named_parameters()}
    dcp.save({**parameters, **moments, "step": 12}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), job_file(tmp_path, "new")]) == 0
    found = imported(tmp_path, "new")
    for name, p in model.named_parameters():
        assert found[name].tobytes() == p.detach().numpy().tobytes()
        for key, value in optimizer.state[p].items():
            assert found[f"{key}/{name}"].tobytes() == value.numpy().tobytes()


OWN_MODEL = """
from torch import nn

class Model(nn.Module):
    def __init__(self, vocab_size, tied):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, 4)
        self.block = nn.ModuleDict({"lin": nn.Linear(4, 4), "norm": nn.LayerNorm(4)})
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, vocab_size, bias=False)
        if tied:
            self.output.weight = self.embedding.weight

    def forward(self, x):
        return self.output(self.norm(self.block["norm"](self.block["lin"](self.embedding(x)))))

def untied(vocab_size, seq_len):
    return Model(vocab_size, False)

def tied(vocab_size, seq_len):
    return Model(vocab_size, True)
"""


@pytest.fixture
def own(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[nn.Module, torch.optim.Optimizer, str]:
    """A module of one's own (the test's parameter ``own``: "tied" or "untied") after a step, and a job with it."""
    (tmp_path / "their_model.py").write_text(OWN_MODEL)
    model = find_build(f"their_model:{request.param}", [tmp_path])(VOCAB, SEQ)
    optimizer = build_optimizer(job(tmp_path, "x").optimizer, model.parameters())
    model(tokens()).square().sum().backward()
    optimizer.step()
    return model, optimizer, job_file(tmp_path, "new", model=f"their_model:{request.param}")


def save_dcp(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    parameters, states = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optim": states}, checkpoint_id=folder, no_dist=True)
    return str(folder)


@pytest.mark.parametrize("own", ["untied", "tied"], indirect=True)
def test_each_parameter_of_ones_own_module_gets_its_own_state(
    own: tuple[nn.Module, torch.optim.Optimizer, str], tmp_path: Path
) -> None:
    model, optimizer, config = own
    assert main(["checkpoint", "import", save_dcp(tmp_path / "theirs", model, optimizer), config]) == 0
    expected = {}
    for name, parameter in model.named_parameters():
        expected[name] = parameter.detach().numpy().tobytes()
        for state, value in optimizer.state[parameter].items():
            expected[f"{state}/{name}"] = value.numpy().tobytes()
    assert {name: array.tobytes() for name, array in imported(tmp_path, "new").items()} == expected


@pytest.mark.parametrize("own", ["tied"], indirect=True)
@pytest.mark.parametrize("kept", [["embedding.weight"], ["output.weight"], ["embedding.weight", "output.weight"]])
def test_a_tied_weight_is_imported_under_either_name_unless_they_differ(
    own: tuple[nn.Module, torch.optim.Optimizer, str],
    kept: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model, _, config = own
    tensors = {name: t.clone() for name, t in model.state_dict().items() if "." in name.removesuffix(".weight")}
    tensors |= {name: model.state_dict()[name].clone() for name in ("norm.weight", "norm.bias", *kept)}
    (tmp_path / "theirs").mkdir()
    if len(kept) == 2:
        save_file(tensors | {kept[1]: tensors[kept[1]] + 1}, tmp_path / "theirs" / "model.safetensors")
        assert main(["checkpoint", "import", str(tmp_path / "theirs"), config]) == 2
        sentence = "embedding.weight and output.weight are one tensor in the job's model, but differ in the source"
        assert sentence in capsys.readouterr().err and not (tmp_path / "new").exists()
    save_file(tensors, tmp_path / "theirs" / "model.safetensors")
    assert main(["checkpoint", "import", str(tmp_path / "theirs"), config]) == 0
    found = imported(tmp_path, "new")
    for name, parameter in model.named_parameters():
        assert found[name].tobytes() == parameter.detach().numpy().tobytes()


@pytest.mark.parametrize("own", ["untied"], indirect=True)
def test_nothing_is_left_of_an_import_that_failed(
    own: tuple[nn.Module, torch.optim.Optimizer, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer, config = own
    source = save_dcp(tmp_path / "theirs", model, optimizer)
    file = tmp_path / "theirs" / "__0_0.distcp"
    content = file.read_bytes()
    flipped = content.replace(model.norm.weight.detach().numpy().tobytes(), bytes(16))
    assert flipped != content
    large = {name: torch.full_like(tensor, 1e300, dtype=torch.float64) for name, tensor in model.state_dict().items()}
    (tmp_path / "large").mkdir()
    save_file(large, tmp_path / "large" / "model.safetensors")
    for folder, data, sentence in [
        (source, content[:-9], "is cut off"),
        (source, flipped, "is damaged in"),
        (str(tmp_path / "large"), content, "holds 1e+300, which is too large for float32"),
    ]:
        file.write_bytes(data)
        assert main(["checkpoint", "import", folder, config]) == 2
        assert sentence in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["checkpoint", "import", source, config]) == 0


def test_an_export_that_failed_leaves_nothing_and_can_be_made_again(
    exported: tuple[Path, Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["checkpoint", "export", str(tmp_path / "run"), str(tmp_path / "again")]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    there = sorted(tmp_path.iterdir())
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        assert main(command) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == there
    assert main(command) == 0
    files = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert files == {path.name: path.read_bytes() for path in exported[0].iterdir()}


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("was-here",)


def test_a_pickle_that_would_run_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    assert main(["checkpoint", "import", "evil", job_file(tmp_path, "new")]) == 2
    assert "it holds posix.mkdir, which no such metadata does" in capsys.readouterr().err
    assert not (tmp_path / "was-here").exists() and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"model.ffn_dim": 64}, r"gate_proj.weight has shape \[48, 32\] in the source, not \[64, 32\] as in the job"),
        ({"model.num_layers": 4}, r"the source has no model\.layers\.3\..* \(9 of 39 parameters are missing\)"),
        ({"model.num_layers": 2}, r"the source has model\.layers\.2\..*, which the job's model has not \(9 such"),
        ({"model.rope_theta": 10000.0}, r"does not describe the job's model: rope_theta is 5000\.0, not 10000\.0"),
        ({"model.num_kv_heads": 4}, r"num_key_value_heads is 2, not 4"),
    ],
)
def test_another_model_is_refused(
    exported: tuple[Path, Reference],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    sentence: str,
) -> None:
    assert main(["checkpoint", "import", str(exported[0]), job_file(tmp_path, "new", **changes)]) == 2
    assert not (tmp_path / "new" / "checkpoints" / "step-00000000").exists()
    assert re.search(sentence, capsys.readouterr().err)


def test_what_is_wrong_with_the_arguments(
    exported: tuple[Path, Reference], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, new = str(exported[0]), job_file(tmp_path, "new")
    for arguments, sentence in [
        (["import", str(tmp_path / "none"), new], "has no model.safetensors"),
        (["import", str(tmp_path / "exported" / "config.json"), new], "has no model.safetensors"),
        (["import", folder, str(tmp_path / "none.yaml")], "cannot be read"),
        (["import", folder, job_file(tmp_path, "run")], "already; choose a new run.name"),
        (["export", str(tmp_path / "run"), folder], "is not empty; choose a new folder"),
        (["export", str(tmp_path / "run"), str(tmp_path / "run" / "in")], "is in the run's folder"),
        (["export", str(tmp_path / "none"), str(tmp_path / "e")], "there is no run in"),
    ]:
        assert main(["checkpoint", *arguments]) == 2, arguments
        error = capsys.readouterr().err
        assert sentence in error and "Traceback" not in error
    for config in ("[", "[]", '{"rope_parameters": 1}'):
        (tmp_path / "exported" / "config.json").write_text(config)
        assert main(["checkpoint", "import", folder, new]) == 2
        assert "config.json" in capsys.readouterr().err
    (tmp_path / "exported" / "config.json").unlink()
    (tmp_path / "exported" / "model-00001-of-00001.safetensors").write_bytes(b"\1" * 30)
    assert main(["checkpoint", "import", folder, new]) == 2
    assert "is not a safetensors file" in capsys.readouterr().err
