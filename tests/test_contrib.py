"""The adapters for torchrl and sb3-contrib against these packages' own results; skipped where they are missing."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import tolerances as tol
import torch

import fastrnn


def close(found: torch.Tensor, truth: torch.Tensor, bound: float = tol.SAME_FLOAT64) -> None:
    tol.assert_close(found, truth, bound)


class TestTorchrl:
    @pytest.fixture(autouse=True)
    def _packages(self):
        self.torchrl = pytest.importorskip("torchrl.modules")
        self.tensordict = pytest.importorskip("tensordict")
        self.adapters = pytest.importorskip("fastrnn.contrib.torchrl")

    def module(self, kind, **options):
        options = dict(input_size=3, hidden_size=4, in_key="obs", out_key="out") | options
        return getattr(self.torchrl, f"{kind}Module")(**options).double()

    def rollouts(self, module, shape, share, states=True):
        """Steps of which a share begins a trajectory, with states that are not zero there."""
        layer = module.lstm if hasattr(module, "lstm") else module.gru
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        data = {"obs": torch.randn(*shape, 3, dtype=torch.float64), "is_init": torch.rand(*shape, 1) < share}
        sizes = (layer.proj_size or layer.hidden_size, layer.hidden_size)
        for key, size in zip(module.in_keys[1:-1] if states else (), sizes, strict=False):
            data[key] = torch.randn(*shape, count, size, dtype=torch.float64)
        return self.tensordict.TensorDict(data, shape)

    def compare(self, mine, theirs, data, recurrent=True):
        results = []
        for module in (mine, theirs):
            own = data.clone()
            inputs = [own[key].requires_grad_() for key in module.in_keys[:-1] if key in own.keys()]
            with self.torchrl.set_recurrent_mode(recurrent):
                assert module(own) is own
            module.zero_grad()
            outputs = [own[key] for key in module.out_keys]
            sum((output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() for output in outputs).backward()
            gradients = [tensor.grad for tensor in (*inputs, *module.parameters())]
            results.append(({*own.keys(True, True)}, [*outputs, *gradients]))
        assert results[0][0] == results[1][0]
        for found, truth in zip(results[0][1], results[1][1], strict=True):
            close(found, truth)

    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    @pytest.mark.parametrize(
        "kind, options",
        [
            ("LSTM", {}),
            ("LSTM", dict(num_layers=2, bias=False)),
            ("LSTM", dict(num_layers=2, bidirectional=True)),
            ("LSTM", dict(proj_size=2)),
            ("GRU", {}),
            ("GRU", dict(num_layers=2, bidirectional=True)),
        ],
    )
    def test_rollouts(self, kind, options, share):
        theirs = self.module(kind, **options)
        mine = copy.deepcopy(theirs)
        report = self.adapters.convert(mine)
        assert report.swapped == [kind.lower()] and type(mine) is getattr(self.adapters, f"{kind}Module")
        for shape in ((7,), (3, 7), (2, 3, 5), (3, 1)):
            self.compare(mine, theirs, self.rollouts(theirs, shape, share))
        self.compare(mine, theirs, self.rollouts(theirs, (3, 7), share, states=False))

    @pytest.mark.parametrize("kind", ["LSTM", "GRU"])
    def test_steps(self, kind):
        theirs = self.module(kind, num_layers=2)
        mine = copy.deepcopy(theirs)
        self.adapters.convert(mine)
        self.compare(mine, theirs, self.rollouts(theirs, (5,), 0.5), recurrent=False)

    @pytest.mark.parametrize("kind", ["LSTM", "GRU"])
    def test_training_in_place_of_torchrl(self, kind):
        """The adapter's own constructor, the whole update, and back again."""
        torch.manual_seed(1)
        theirs = self.module(kind)
        torch.manual_seed(1)
        adapter = getattr(self.adapters, f"{kind}Module")
        mine = adapter(input_size=3, hidden_size=4, in_key="obs", out_key="out").double()
        assert isinstance(mine, getattr(self.torchrl, f"{kind}Module"))
        data = self.rollouts(theirs, (4, 9), 0.2)
        for module in (mine, theirs):
            optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
            for _ in range(3):
                with self.torchrl.set_recurrent_mode(True):
                    loss = (module(data.clone())["out"] - 1).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for found, truth in zip(mine.parameters(), theirs.parameters(), strict=True):
            close(found, truth)
        self.compare(pickle.loads(pickle.dumps(mine)), theirs, data)
        assert fastrnn.revert(mine).swapped == [kind.lower()]
        self.compare(mine, theirs, data)

    @pytest.mark.parametrize("kind", ["LSTM", "GRU"])
    def test_python_layers_and_other_backends(self, kind):
        theirs = self.module(kind, python_based=True)
        mine = copy.deepcopy(theirs)
        parameters = dict(mine.named_parameters())
        assert self.adapters.convert(mine).swapped == [kind.lower()]
        assert all(parameters[name] is parameter for name, parameter in mine.named_parameters())
        self.compare(mine, theirs, self.rollouts(theirs, (3, 7), 0.3))
        scan = self.module(kind, recurrent_backend="scan", recurrent_recompute="full")
        self.adapters.convert(scan)
        assert getattr(scan, kind.lower()).recompute
        scan.load_state_dict(theirs.state_dict())
        self.compare(scan, theirs, self.rollouts(theirs, (3, 7), 0.3))

    @pytest.mark.parametrize("kind", ["LSTM", "GRU"])
    def test_convert_leaves_torchrls_own(self, kind):
        model = torch.nn.Sequential(self.module(kind), self.module(kind, python_based=True))
        report = fastrnn.convert(model)
        assert not report.swapped and set(report.left) == {f"{i}.{kind.lower()}" for i in range(2)}
        assert f"fastrnn.contrib.torchrl.{kind}Module" in report.left[f"0.{kind.lower()}"]
        data = self.rollouts(model[0], (3, 7), 0.5)
        with self.torchrl.set_recurrent_mode(True):
            model(data)

    def test_half_of_the_states(self):
        module = self.module("LSTM")
        self.adapters.convert(module)
        data = self.rollouts(module, (3, 7), 0.3)
        del data["recurrent_state_c"]
        with pytest.raises(RuntimeError, match="all of the states"), self.torchrl.set_recurrent_mode(True):
            module(data)


class TestSb3:
    @pytest.fixture(autouse=True)
    def _packages(self):
        pytest.importorskip("sb3_contrib")
        self.gym = pytest.importorskip("gymnasium")
        self.adapters = pytest.importorskip("fastrnn.contrib.sb3")

    def algorithm(self, policy, **options):
        from sb3_contrib import RecurrentPPO

        gym = self.gym

        class Environment(gym.Env):
            """Random observations, episodes of random length."""

            observation_space, action_space = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Discrete(2)

            def reset(self, seed=None, options=None):
                super().reset(seed=seed)
                return self.np_random.random(3).astype("float32"), {}

            def step(self, action):
                end = bool(self.np_random.random() < 0.2)
                return self.np_random.random(3).astype("float32"), float(action), end, False, {}

        options = dict(lstm_hidden_size=8, optimizer_class=torch.optim.SGD) | options
        return RecurrentPPO(
            policy, Environment(), learning_rate=0.1, n_steps=32, batch_size=16, n_epochs=2, seed=0, device="cpu",
            policy_kwargs=options,
        )  # fmt: skip

    @pytest.mark.parametrize(
        "options",
        [{}, dict(n_lstm_layers=2), dict(shared_lstm=True, enable_critic_lstm=False), dict(enable_critic_lstm=False)],
    )
    def test_learning(self, options):
        """Rollouts, updates and predictions are sb3-contrib's."""
        import numpy

        learned = []
        for policy in (self.adapters.MlpLstmPolicy, "MlpLstmPolicy"):
            algorithm = self.algorithm(policy, **options)
            algorithm.env.seed(1)
            before = [parameter.detach().clone() for parameter in algorithm.policy.parameters()]
            algorithm.learn(64)
            learned.append(algorithm)
        mine, theirs = (algorithm.policy for algorithm in learned)
        assert type(mine.lstm_actor) is fastrnn.LSTM and type(theirs.lstm_actor) is torch.nn.LSTM
        assert any((a - b).abs().max() > 0.01 for a, b in zip(theirs.parameters(), before, strict=True))
        for found, truth in zip(mine.parameters(), theirs.parameters(), strict=True):
            close(found, truth, tol.SAME_FLOAT32)
        observation = numpy.zeros((2, 3), "float32")
        states = [policy.predict(observation, episode_start=numpy.array([True, False]))[1] for policy in (mine, theirs)]
        for found, truth in zip(*states, strict=True):
            close(torch.from_numpy(found), torch.from_numpy(truth), tol.SAME_FLOAT32)

    def test_starts_in_the_middle(self):
        """A batch with episodes that begin anywhere: values, states and gradients."""
        theirs = self.algorithm("MlpLstmPolicy").policy
        mine = copy.deepcopy(theirs)
        self.adapters.convert(mine)
        features, starts = torch.randn(4 * 9, 3), (torch.rand(4 * 9) < 0.3).float()
        states = (torch.randn(1, 4, 8), torch.randn(1, 4, 8))
        results = []
        for policy in (mine, theirs):
            output, final = policy._process_sequence(features, states, starts, policy.lstm_actor)
            gradients = torch.autograd.grad(output.square().sum() + final[1].sum(), [*policy.lstm_actor.parameters()])
            results.append([output, *final, *gradients])
        for found, truth in zip(*results, strict=True):
            tol.assert_close(found, truth, tol.SAME_FLOAT32, relative=True)

    def test_converting_loading_and_reverting(self):
        from sb3_contrib import RecurrentPPO

        theirs = self.algorithm("MlpLstmPolicy")
        report = fastrnn.convert(theirs.policy)
        assert report.swapped == ["lstm_actor", "lstm_critic"] and "fastrnn.contrib.sb3.convert" in report.notes[""]
        assert not self.adapters.convert(theirs.policy).notes
        assert type(theirs.policy) is self.adapters.RecurrentActorCriticPolicy
        theirs.learn(32)
        fastrnn.revert(theirs.policy)
        theirs.learn(32)
        file = io.BytesIO()
        self.algorithm(self.adapters.MlpLstmPolicy).save(file)
        file.seek(0)
        assert type(RecurrentPPO.load(file).policy.lstm_actor) is fastrnn.LSTM
