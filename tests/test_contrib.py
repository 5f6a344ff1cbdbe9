"""The adapters for torchrl, sb3-contrib and opacus, compared with these packages' own results; skipped without them."""

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
        """Steps of which a share start a trajectory, with nonzero states at these."""
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
        """The adapter's own constructor, a whole update, and revert."""
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
        """A batch with episodes that start anywhere: values, states and gradients."""
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


PRIVATE = {
    "lstm": lambda **kw: fastrnn.LSTM(3, 4, **kw),
    "lstm_layers": lambda **kw: fastrnn.LSTM(3, 4, 2, bidirectional=True, bias=False, **kw),
    "lstm_projected": lambda **kw: fastrnn.LSTM(3, 4, 2, proj_size=2, cell_clip=0.1, **kw),
    "gru": lambda **kw: fastrnn.GRU(3, 4, 2, bidirectional=True, **kw),
    "gru_reset_before": lambda **kw: fastrnn.GRU(3, 4, reset_after=False, recompute=True, **kw),
    "rnn": lambda **kw: fastrnn.RNN(3, 4, **kw),
}


def test_a_hook_of_opacus_goes_to_its_adapter():
    """With a stand-in for opacus' GradSampleModule, so that the tests below are not the only ones to see it."""

    class Wrapper:
        __module__ = "opacus.grad_sample.grad_sample_module"

        def capture(self, module, inputs, output):
            pass

    for layer in (fastrnn.LSTM(3, 4), fastrnn.GRU(3, 4)):
        handle = layer.register_forward_hook(Wrapper().capture)
        assert len(layer._opacus_hooks) == 1 and not layer._forward_hooks
        handle.remove()
        assert not layer._opacus_hooks
        layer.register_forward_hook(lambda *_: None)
        assert not layer._opacus_hooks and len(layer._forward_hooks) == 1


class TestOpacus:
    @pytest.fixture(autouse=True)
    def _packages(self):
        self.opacus = pytest.importorskip("opacus")
        torch.manual_seed(0)

    def loss(self, output, final):
        """A loss that depends on the output and every final state."""
        states = final if isinstance(final, tuple) else (final,)
        return output.square().sum() + sum((state.sin() * (i + 1)).sum() for i, state in enumerate(states))

    def one_by_one(self, layer, loss, rows):
        """Gradients of ``loss(row)`` for each row separately, without opacus."""
        parameters = [*layer.parameters()]
        gradients = [torch.autograd.grad(loss(row), parameters) for row in range(rows)]
        return [torch.stack(parts) for parts in zip(*gradients, strict=True)]

    def compare(self, layer, truth, scale=1.0):
        for parameter, expected in zip(layer.parameters(), truth, strict=True):
            tol.assert_close(parameter.grad_sample, expected, tol.SAME_FLOAT64, relative=True)
            tol.assert_close(parameter.grad * scale, expected.sum(0), tol.SAME_FLOAT64, relative=True)

    def states(self, layer, rows):
        count = layer.num_layers * (2 if layer.bidirectional else 1)
        states = tuple(torch.randn(count, rows, width, dtype=torch.float64) for width in layer._state_widths())
        return states, lambda part: (states[0][:, part], states[1][:, part]) if len(states) > 1 else states[0][:, part]

    @pytest.mark.parametrize("reduction", ["sum", "mean"])
    @pytest.mark.parametrize("batch_first", [True, False])
    @pytest.mark.parametrize("name", PRIVATE)
    def test_each_row(self, name, batch_first, reduction):
        """Like each row alone, with lengths, resets, initial states and a loss of all results."""
        layer = PRIVATE[name](batch_first=batch_first, dtype=torch.float64)
        plain = copy.deepcopy(layer)
        private = self.opacus.GradSampleModule(layer, batch_first=batch_first, loss_reduction=reduction)
        x, resets, lengths = torch.randn(5, 4, 3).double(), torch.rand(5, 4) < 0.3, torch.tensor([5, 0, 3, 1])
        _, hx = self.states(layer, 4)

        def loss(module, part):
            mine, cut = (t.transpose(0, 1) if batch_first else t for t in (x[:, part], resets[:, part]))
            return self.loss(*module(mine, hx(part), lengths=lengths[part], resets=cut))

        scale = 4.0 if reduction == "mean" else 1.0
        (loss(private, slice(None)) / scale).backward()
        self.compare(layer, self.one_by_one(plain, lambda b: loss(plain, slice(b, b + 1)), 4), scale)

    @pytest.mark.parametrize("in_order", [True, False])
    @pytest.mark.parametrize("name", PRIVATE)
    def test_packed(self, name, in_order):
        """Samples are in the given order; gradients of input and initial state equal torch's."""
        layer = PRIVATE[name](dtype=torch.float64)
        plain = copy.deepcopy(layer)
        private = self.opacus.GradSampleModule(layer, loss_reduction="sum")
        lengths = [5, 3, 2, 2] if in_order else [2, 5, 2, 3]
        states, hx = self.states(layer, 4)
        rows = [torch.randn(n, 3, dtype=torch.float64) for n in lengths]
        wanted = [t.requires_grad_() for t in (*rows, *states)]
        results = []
        for module in (private, plain):
            packed = torch.nn.utils.rnn.pack_sequence(rows, enforce_sorted=in_order)
            output, final = module(packed, hx(slice(None)))
            loss = self.loss(output.data, final)
            if module is private:
                loss.backward()
                results.append([output.data, *(t.grad for t in wanted)])
            else:
                results.append([output.data, *torch.autograd.grad(loss, wanted)])
        for found, truth in zip(*results, strict=True):
            tol.assert_close(found, truth, tol.SAME_FLOAT64, relative=True)
        alone = lambda b: self.loss(*plain(rows[b].unsqueeze(1), hx(slice(b, b + 1))))  # noqa: E731
        self.compare(layer, self.one_by_one(plain, alone, 4))

    @pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
    def test_beside_opacus_own_layers(self, kind):
        import opacus.layers

        theirs = getattr(opacus.layers, f"DP{kind}")(3, 4, 2, batch_first=True, bidirectional=True).double()
        mine = getattr(fastrnn, kind)(3, 4, 2, batch_first=True, bidirectional=True, dtype=torch.float64)
        mine.load_state_dict(theirs.state_dict())
        x = torch.randn(4, 5, 3, dtype=torch.float64)
        for layer in (mine, theirs):
            self.opacus.GradSampleModule(layer)(x)[0].square().mean().backward()
        samples = dict(theirs.named_parameters())
        for name, parameter in mine.named_parameters():
            tol.assert_close(parameter.grad_sample, samples[name].grad_sample, tol.SAME_FLOAT64, name, relative=True)

    def test_several_calls_and_passes(self):
        """Several calls before one backward pass are summed; each pass has its own gradients; evaluation has none."""
        layer = fastrnn.GRU(3, 4, batch_first=True, dtype=torch.float64)
        plain = copy.deepcopy(layer)
        private = self.opacus.GradSampleModule(layer, loss_reduction="sum")
        x = torch.randn(4, 5, 3, dtype=torch.float64)
        loss = lambda module, x: self.loss(*module(x)) + self.loss(*module(2 * x))  # noqa: E731
        truth = self.one_by_one(plain, lambda b: loss(plain, x[b : b + 1]), 4)
        for _ in range(2):
            loss(private, x).backward()
        for parameter, expected in zip(layer.parameters(), truth, strict=True):
            for found in parameter.grad_sample:
                tol.assert_close(found, expected, tol.SAME_FLOAT64, relative=True)
        private.zero_grad()
        private.eval()
        private(x)[0].sum().backward()
        assert all(parameter.grad is not None and parameter.grad_sample is None for parameter in layer.parameters())

    def test_an_empty_batch(self):
        layer = fastrnn.LSTM(3, 4, 2, batch_first=True)
        self.opacus.GradSampleModule(layer)(torch.randn(0, 5, 3))[0].sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad_sample.shape == (0, *parameter.shape) and not parameter.grad.any()

    def test_frozen_and_foreign_parameters(self):
        layer = fastrnn.LSTM(3, 4, batch_first=True, dtype=torch.float64)
        layer.weight_hh_l0.requires_grad_(False)
        plain = copy.deepcopy(layer).requires_grad_(True)
        x = torch.randn(4, 5, 3, dtype=torch.float64)
        self.opacus.GradSampleModule(layer, loss_reduction="sum")(x)[0].sum().backward()
        truth = self.one_by_one(plain, lambda b: plain(x[b : b + 1])[0].sum(), 4)
        for (name, parameter), expected in zip(layer.named_parameters(), truth, strict=True):
            if name == "weight_hh_l0":
                assert parameter.grad is None
            else:
                tol.assert_close(parameter.grad_sample, expected, tol.SAME_FLOAT64, name, relative=True)

        layer = fastrnn.LSTM(3, 4)
        layer.scale = torch.nn.Parameter(torch.ones(()))
        with pytest.raises(RuntimeError, match="opacus cannot train scale"):
            self.opacus.GradSampleModule(layer)(torch.randn(5, 2, 3))

    class Classifier(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = torch.nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True), torch.nn.Linear(8, 3)

        def forward(self, x):
            output, (h_n, _) = self.rnn(x)
            return self.head(output[:, -1] + h_n[-2:].transpose(0, 1).flatten(1))

    def private(self, model, norm, mode, batch=8):
        """The private model, its optimizer, loss and batches."""
        data = torch.utils.data.TensorDataset(torch.randn(16, 5, 3), torch.randint(3, (16,)))
        model, optimizer, *criterion, batches = self.opacus.PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5), noise_multiplier=0.0,
            data_loader=torch.utils.data.DataLoader(data, batch_size=batch), max_grad_norm=norm, poisson_sampling=False,
            grad_sample_mode=mode, **(dict(criterion=torch.nn.CrossEntropyLoss()) if mode == "ghost" else {}),
        )  # fmt: skip
        return model, optimizer, criterion[0] if criterion else torch.nn.functional.cross_entropy, batches

    @pytest.mark.parametrize("norm", [1e6, 0.1])
    @pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
    def test_private_training(self, mode, norm):
        """Without noise, steps use the clipped gradients of each sample; with a large bound, the ordinary ones."""
        model = self.Classifier()
        assert fastrnn.convert(model).swapped == ["rnn"]
        assert self.opacus.validators.ModuleValidator.is_valid(model)
        plain = copy.deepcopy(model)
        private, optimizer, criterion, batches = self.private(model, norm, mode)
        parameters = [*plain.parameters()]
        for x, y in batches:
            optimizer.zero_grad()
            criterion(private(x), y).backward()
            optimizer.step()
            clipped = [torch.zeros_like(parameter) for parameter in parameters]
            for row in range(len(x)):
                loss = torch.nn.functional.cross_entropy(plain(x[row : row + 1]), y[row : row + 1])
                gradients = torch.autograd.grad(loss, parameters)
                size = torch.stack([gradient.norm() for gradient in gradients]).norm()
                for total, gradient in zip(clipped, gradients, strict=True):
                    total += gradient * min(1.0, norm / size.item())
            with torch.no_grad():
                for parameter, total in zip(parameters, clipped, strict=True):
                    parameter -= 0.5 * total / len(x)
        for found, truth in zip(model.parameters(), parameters, strict=True):
            tol.assert_close(found, truth, tol.SAME_FLOAT32)

    def test_swapping_before_and_after(self):
        """convert and revert leave layers with opacus' hooks; after opacus is removed, nothing of it remains."""
        model = self.Classifier()
        late = self.opacus.GradSampleModule(copy.deepcopy(model))
        assert "make_private" in fastrnn.convert(late).left["_module.rnn"]
        fastrnn.convert(model)
        private = self.opacus.GradSampleModule(model)
        assert not fastrnn.convert(private).left
        assert "to_standard_module" in fastrnn.revert(private).left["_module.rnn"]
        private(torch.randn(2, 5, 3)).sum().backward()
        assert model.rnn.weight_ih_l0.grad_sample.shape == (2, 16, 3)
        assert private.to_standard_module() is model
        model = pickle.loads(pickle.dumps(model))
        model(torch.randn(2, 5, 3)).sum().backward()
        assert not hasattr(model.rnn.weight_ih_l0, "grad_sample")
        assert fastrnn.revert(model).swapped == fastrnn.convert(model).swapped == ["rnn"]
