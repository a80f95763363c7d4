"""Bundles: the same network to the bit, one sentence for every bad file, found by name or path."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from ase.build import bulk
from safetensors.torch import save_file
from torch import nn

from relaxion import policies as library
from relaxion.errors import PolicyError
from relaxion.files import Stored
from relaxion.model import policy_file as bundle_module
from relaxion.model import policy_file as bundled
from relaxion.model.actions import INFORMATION, MoveActions
from relaxion.model.atom_policies import AtomGaussianPolicy, AtomPolicy, StiffnessGaussianPolicy, StiffnessPolicy
from relaxion.model.backbone import AtomNetworkSettings
from relaxion.model.card import CardResult, ModelCard
from relaxion.model.policy_file import Network, PolicyFile, described, policy_of, uncovered
from relaxion.model.stiffness_network import StiffnessSettings
from relaxion.policies import find_policy, known_policies, user_folder
from relaxion.structures import Evaluation, Move, State, Structures

CARD = ModelCard(
    elements=("Cu", "Al"),
    smallest_n_atoms=2,
    largest_n_atoms=16,
    potential="emt",
    starts=("rattle 0.1 Å",),
    force_tolerance_ev_per_angstrom=0.05,
    agent="td3",
    training_command="relaxion train emt-metals --seed 3",
    seed=3,
    environment_steps=1000,
    wall_time_seconds=12.5,
    n_assessment_starts=64,
    results=(
        CardResult(optimizer="policy", mean_force_calls=7.25, success_rate=0.984375, largest_force_calls=40),
        CardResult(optimizer="BFGS", mean_force_calls=17.8, success_rate=1.0),
    ),
    fails_on=("1 of 64 starts did not converge.",),
    relaxion_version="0.0.1",
    date="2026-11-16",
    training_settings={"task": "relax", "seed": 3, "nothing": None},
)


def e3nn_missing() -> bool:
    try:
        return not version("e3nn")
    except PackageNotFoundError:
        return True


needs_e3nn = pytest.mark.skipif(e3nn_missing(), reason="e3nn is not installed")
backbones = pytest.mark.parametrize("backbone", ["light", pytest.param("tensor_field", marks=needs_e3nn)])


def make_policy(kind: type[Any] = AtomPolicy, backbone: str = "light", gated: bool = False) -> Any:
    names = tuple(INFORMATION)[:2] if gated else ()
    settings_kind = StiffnessSettings if issubclass(kind, StiffnessPolicy) else AtomNetworkSettings
    settings = settings_kind.read({"backbone": backbone, "channels": 4, "environment_information": names})
    return kind(MoveActions(0.3, 0.07), settings, torch.Generator().manual_seed(5))


def make_bundle(policy: Any = None, **changes: Any) -> PolicyFile:
    return replace(PolicyFile("metals", {"policy": described(policy or make_policy())}, CARD), **changes)


def make_state() -> State:
    alloy = bulk("Al", cubic=True)
    alloy.numbers[0] = 29
    structures = Structures.from_ase([alloy, bulk("Cu")], cell_free=[True, False])
    generator = torch.Generator().manual_seed(1)
    forces, last = (torch.randn((5, 3), generator=generator, dtype=torch.float64) for _ in range(2))
    stresses = torch.eye(3, dtype=torch.float64).repeat(2, 1, 1) * 0.02
    return State(
        structures=structures,
        evaluation=Evaluation(torch.zeros(2, dtype=torch.float64), forces, stresses),
        graph=None,
        last_move=Move(0.1 * last, torch.zeros(2, 3, 3, dtype=torch.float64)),
        last_forces=last,
        trust_radii=torch.full((2,), 0.2, dtype=torch.float64),
        calls=torch.tensor([2, 3]),
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metals.safetensors"


@pytest.fixture(autouse=True)
def own_library(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Folders of shipped bundles and of the user's, both empty."""
    shipped, user = tmp_path_factory.mktemp("shipped"), tmp_path_factory.mktemp("user")
    monkeypatch.setattr(library, "SHIPPED", shipped)
    monkeypatch.setenv("RELAXION_POLICIES", str(user))
    return shipped, user


@backbones
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        (AtomPolicy, "direct"),
        (AtomGaussianPolicy, "direct"),
        (StiffnessPolicy, "stiffness"),
        (StiffnessGaussianPolicy, "stiffness"),
    ],
)
def test_the_same_moves_to_the_bit(path: Path, backbone: str, dtype: torch.dtype, kind: type[Any], word: str) -> None:
    before = make_policy(kind, backbone, gated=True).to(dtype)
    make_bundle(before).write(path)
    global_draws = torch.get_rng_state()
    after = policy_of(PolicyFile.read(path))
    assert torch.equal(torch.get_rng_state(), global_draws)
    assert (type(after), PolicyFile.read(path).kind) == (kind, word)
    state = make_state()
    with torch.no_grad():
        expected, got = before(state), after(state)
    assert torch.equal(expected.displacements, got.displacements)
    assert torch.equal(expected.strains, got.strains)
    assert expected.displacements.abs().max() > 0.001
    assert expected.strains.abs().max() > 0
    assert not any(parameter.requires_grad for parameter in after.parameters())


def test_everything_comes_back(path: Path) -> None:
    bundle = make_bundle()
    bundle.write(path)
    read = PolicyFile.read(path)
    assert (read.name, read.kind, read.card) == ("metals", "direct", CARD)
    assert read.policy.settings == bundle.policy.settings
    assert read.weights_sha256 == bundle.weights_sha256
    assert read.n_numbers == sum(t.numel() for t in make_policy().state_dict().values())


def test_a_trust_rule_beside_the_policy(path: Path) -> None:
    gate = Network("gate", {"width": 2}, {"weight": torch.ones(2)}, {})
    bundle = make_bundle()
    replace(bundle, networks={**bundle.networks, "gate": gate}).write(path)
    read = PolicyFile.read(path)
    assert read.kind == "direct + step rule"
    assert read.networks["gate"].weights["weight"].tolist() == [1, 1]
    assert policy_of(read).state_dict().keys() == make_policy().state_dict().keys()


def test_reading_and_rebuilding_load_no_training_code(path: Path) -> None:
    make_bundle().write(path)
    code = f"""
import sys
from relaxion.policies import find_policy
from relaxion.model.policy_file import policy_of
policy_of(find_policy({str(path)!r}))
print([n for n in sys.modules if n.startswith(("relaxion.train.agents", "relaxion.train.experience", "relaxion.train",
                                               "gymnasium", "e3nn", "tensorboard", "matplotlib"))])
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_newer_format(path: Path) -> None:
    replace(bundle_module.FORMAT, version=3).write(path, bundle_module.KIND, {}, {})
    with pytest.raises(PolicyError, match="has format version 3, this relaxion reads 2; update relaxion"):
        PolicyFile.read(path)


def test_an_older_format_is_upgraded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_bundle().write(path)

    def renamed(stored: Stored) -> Stored:
        return Stored(stored.tensors, {**stored.values, "name": stored.values["name"].upper()})

    monkeypatch.setattr(bundle_module, "FORMAT", replace(bundle_module.FORMAT, version=3, upgrades={2: renamed}))
    assert PolicyFile.read(path).name == "METALS"


@pytest.mark.parametrize("keep", [0, 7, 200, -1])
def test_truncated(path: Path, keep: int) -> None:
    make_bundle().write(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(PolicyError, match=r"is damaged or not a safetensors file .*; download it again"):
        PolicyFile.read(path)


def test_one_changed_bit_and_a_changed_card(path: Path) -> None:
    make_bundle().write(path)
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[-5] ^= 1
    for content in (bytes(changed), whole.replace(b"emt-metals", b"emt-medals")):
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(PolicyError, match="do not match their digest"):
            PolicyFile.read(path)


def test_foreign(path: Path) -> None:
    save_file({"x": torch.zeros(1)}, path)
    with pytest.raises(PolicyError, match="was not written by relaxion"):
        PolicyFile.read(path)
    bundle_module.FORMAT.write(path, "relaxion agent", {"x": torch.zeros(1)}, {})
    with pytest.raises(PolicyError, match="holds a relaxion agent, not a relaxion policy"):
        PolicyFile.read(path)
    torch.save({"x": torch.zeros(1)}, path)  # a pickle
    with pytest.raises(PolicyError, match="damaged or not a safetensors file"):
        PolicyFile.read(path)
    with pytest.raises(PolicyError, match="does not exist"):
        PolicyFile.read(path.with_name("nothing"))


def test_half_a_bundle(path: Path) -> None:
    bundle_module.FORMAT.write(path, bundle_module.KIND, {"policy.x": torch.zeros(1)}, {"name": "metals"})
    with pytest.raises(PolicyError, match=r"metals.safetensors is not a complete policy: .*networks.*; card"):
        PolicyFile.read(path)
    with pytest.raises(PolicyError, match="metals has no policy, only gate"):
        make_bundle(networks={"gate": Network("gate", {}, {"x": torch.zeros(1)}, {})})
    with pytest.raises(PolicyError, match="no weights"):
        Network("direct", {}, {}, {})


def test_weights_that_are_not_finite() -> None:
    policy = make_policy()
    with torch.no_grad():
        next(policy.parameters()).fill_(float("nan"))
    with pytest.raises(PolicyError, match="are not finite"):
        described(policy)


def test_what_cannot_be_rebuilt() -> None:
    network = described(make_policy())
    with pytest.raises(PolicyError, match=r"'oracle'.*direct.*; update it"):
        bundled.rebuilt(replace(network, kind="oracle"), "metals")
    other = {**network.settings, "network": {**network.settings["network"], "channels": 5}}
    with pytest.raises(PolicyError, match="weights and settings of metals do not belong together"):
        bundled.rebuilt(replace(network, settings=other), "metals")
    extra = {**network.weights, "more": torch.zeros(1)}
    with pytest.raises(PolicyError, match="do not belong together: more"):
        bundled.rebuilt(replace(network, weights=extra), "metals")
    unknown = {**network.settings, "network": {"chanels": 4}}
    with pytest.raises(PolicyError, match=r"metals cannot be rebuilt .*did you mean 'channels'"):
        bundled.rebuilt(replace(network, settings=unknown), "metals")
    with pytest.raises(PolicyError, match="a Linear cannot be packaged"):
        described(nn.Linear(1, 1))


@needs_e3nn
def test_another_e3nn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = described(make_policy(backbone="tensor_field"))
    assert network.requires == {"e3nn": version("e3nn")}
    for there, fits in ((version("e3nn"), True), (version("e3nn") + ".post1", True), ("0.4.4", False)):
        monkeypatch.setattr(bundled, "version", lambda _package, there=there: there)
        if fits:
            bundled.rebuilt(network, "metals")
        else:
            with pytest.raises(PolicyError, match=r"trained with e3nn .* and may mean something else with 0\.4\.4"):
                bundled.rebuilt(network, "metals")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(package: str) -> str:
        raise PackageNotFoundError(package)

    network = replace(described(make_policy()), requires={"e3nn": "0.6.0"})
    monkeypatch.setattr(bundled, "version", missing)
    with pytest.raises(PolicyError, match=r"metals needs e3nn 0\.6\.0, which is not installed; try: pip install"):
        bundled.rebuilt(network, "metals")


def test_what_is_covered() -> None:
    bundle = make_bundle()
    assert not uncovered(bundle, bulk("Cu").numbers)
    assert not uncovered(bundle, torch.tensor([13, 29, 13]))
    assert uncovered(bundle, [13, 79])
    assert uncovered(bundle, [79, 13, 28, 79]) == ("Ni", "Au")
    assert bundle.card.elements == ("Al", "Cu")  # in the order of the periodic table
    wider = replace(bundle, card=bundle.card.model_copy(update={"unseen": ("Au",)}))
    assert uncovered(wider, [79, 13, 28, 79]) == ("Ni",)


def test_a_card_names_real_elements() -> None:
    values = CARD.model_dump() | {"elements": ("Al", "Xx")}
    with pytest.raises(ValueError, match="'Xx' is not an element"):
        ModelCard.read(values)


def test_found_by_name_or_path(own_library: tuple[Path, Path], path: Path) -> None:
    shipped, user = own_library
    with pytest.raises(PolicyError, match="none ships with this relaxion and none is in"):
        find_policy("metals")
    make_bundle(name="theirs").write(user / "metals.safetensors")
    assert find_policy("metals").name == "theirs"
    make_bundle(name="ours").write(shipped / "metals.safetensors")
    assert find_policy("metals").name == "ours"  # a shipped name means the same everywhere
    make_bundle(name="file").write(path)
    assert find_policy(path).name == find_policy(str(path)).name == "file"
    with pytest.raises(PolicyError, match="no policy named 'metal': did you mean 'metals'"):
        find_policy("metal")
    with pytest.raises(PolicyError, match=r"nothing\.safetensors does not exist"):
        find_policy("nothing.safetensors")


def test_a_damaged_one_does_not_hide_the_others(own_library: tuple[Path, Path]) -> None:
    shipped, user = own_library
    make_bundle().write(shipped / "metals.safetensors")
    (user / "broken.safetensors").write_bytes(b"nonsense")
    make_bundle().write(user / "mine.safetensors")
    known = known_policies()
    assert [(one.name, one.shipped, one.bundle is None) for one in known] == [
        ("metals", True, False),
        ("broken", False, True),
        ("mine", False, False),
    ]
    assert "damaged" in str(known[1].error)


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RELAXION_POLICIES")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder() == tmp_path / ".local" / "share" / "relaxion" / "policies"
    assert known_policies() == []  # it need not exist


def test_the_card_in_words() -> None:
    text = make_bundle().card_text()
    for line in (
        "# metals",
        "| elements | Al Cu |",
        "| atoms per structure | 2–16 |",
        "| starts | rattle 0.1 Å |",
        "| policy | 7.2 | 40 | 98.4 % |",
        "| BFGS | 17.8 | – | 100 % |",
        "- 1 of 64 starts did not converge.",
        "relaxion train emt-metals --seed 3",
        'task = "relax"',
    ):
        assert line in text.splitlines(), line
    assert make_bundle().weights_sha256 in text
    assert "nothing" not in text
    unknown = make_bundle(card=CARD.model_copy(update={"results": (), "fails_on": ()})).card_text()
    assert "Never assessed." in unknown
    json.dumps(CARD.model_dump(mode="json"))
