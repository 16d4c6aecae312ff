"""What is trained: a small network that recognizes the language spoken in a recording.

A recording becomes a log-mel spectrogram. The mean, the spread and the change over time of each of
its 40 bands go into a network with one hidden layer. It uses PyTorch if that is installed, NumPy
otherwise: the same layers, the same optimizer, the same initial numbers.
"""

import io
import wave

import numpy as np

try:
    import torch

    torch.set_num_threads(1)
except ImportError:
    torch = None

RATE, FRAME, HOP, BANDS = 8000, 256, 128, 40
SECONDS_MAX = 2
FEATURES = 3 * BANDS
HIDDEN, LEARNING_RATE, MOMENTUM = 128, 0.05, 0.9
BACKEND = f"PyTorch {torch.__version__}" if torch else f"NumPy {np.__version__}"


def _mel_filters() -> np.ndarray:
    """Triangles, evenly spaced in mel, over the bins of a frame's spectrum: FRAME/2+1 rows, BANDS
    columns.
    """
    mel = lambda hz: 1127 * np.log1p(hz / 700)  # noqa: E731
    edges = np.linspace(mel(60), mel(RATE / 2), BANDS + 2)
    bins = mel(np.fft.rfftfreq(FRAME, 1 / RATE))[:, None]
    rising, falling = (
        (bins - edges[:-2]) / (edges[1:-1] - edges[:-2]),
        (edges[2:] - bins) / (edges[2:] - edges[1:-1]),
    )
    return np.maximum(0, np.minimum(rising, falling)).astype(np.float32)


FILTERS, WINDOW = _mel_filters(), np.hanning(FRAME).astype(np.float32)


def features(wav) -> np.ndarray:
    """From the bytes of a WAV file to FEATURES numbers."""
    with wave.open(io.BytesIO(wav)) as file:
        sound = (
            np.frombuffer(file.readframes(SECONDS_MAX * RATE), dtype="<i2").astype(np.float32)
            / 32768
        )
    if len(sound) < FRAME + 2 * HOP:
        sound = np.pad(sound, (0, FRAME + 2 * HOP - len(sound)))
    frames = np.lib.stride_tricks.sliding_window_view(sound, FRAME)[::HOP] * WINDOW
    spectrum = np.fft.rfft(frames, axis=1)
    bands = np.log((spectrum.real**2 + spectrum.imag**2) @ FILTERS + np.float32(1e-6))
    return np.concatenate([bands.mean(0), bands.std(0), np.diff(bands, axis=0).std(0)])


class Model:
    """Features, scaled as the first batch was, through one hidden layer to one score for each
    language.
    """

    def __init__(self, classes: int, seed: int):
        numbers = np.random.default_rng(seed)
        shapes = [(FEATURES, HIDDEN), (HIDDEN,), (HIDDEN, classes), (classes,)]
        start = [
            numbers.normal(0, np.sqrt(2 / s[0]), s).astype(np.float32)
            if len(s) == 2
            else np.zeros(s, np.float32)
            for s in shapes
        ]
        self.scale = None
        self.params = [torch.tensor(p, requires_grad=True) for p in start] if torch else start
        self.speed = [0 * p for p in start]
        if torch:
            self.optimizer = torch.optim.SGD(self.params, lr=LEARNING_RATE, momentum=MOMENTUM)

    def _scaled(self, x: np.ndarray) -> np.ndarray:
        if self.scale is None:
            self.scale = x.mean(0), x.std(0) + 1e-3
        return ((x - self.scale[0]) / self.scale[1]).astype(np.float32)

    def step(self, x: np.ndarray, labels: np.ndarray) -> float:
        """One step of gradient descent; returns the batch's mean cross-entropy, in nats."""
        x = self._scaled(x)
        if torch:
            w1, b1, w2, b2 = self.params
            scores = torch.relu(torch.from_numpy(x) @ w1 + b1) @ w2 + b2
            loss = torch.nn.functional.cross_entropy(scores, torch.from_numpy(labels))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            return float(loss.detach())
        w1, b1, w2, b2 = self.params
        hidden = np.maximum(x @ w1 + b1, 0)
        scores = hidden @ w2 + b2
        scores -= scores.max(1, keepdims=True)
        chance = np.exp(scores)
        chance /= chance.sum(1, keepdims=True)
        rows = np.arange(len(x))
        loss = -np.log(chance[rows, labels] + 1e-12).mean()
        chance[rows, labels] -= 1
        d_scores = chance / len(x)
        d_hidden = (d_scores @ w2.T) * (hidden > 0)
        for i, d in enumerate(
            (x.T @ d_hidden, d_hidden.sum(0), hidden.T @ d_scores, d_scores.sum(0))
        ):
            self.speed[i] = MOMENTUM * self.speed[i] + d
            self.params[i] -= LEARNING_RATE * self.speed[i]
        return float(loss)

    def accuracy(self, x: np.ndarray, labels: np.ndarray) -> float:
        w1, b1, w2, b2 = (p.detach().numpy() for p in self.params) if torch else self.params
        return float(
            ((np.maximum(self._scaled(x) @ w1 + b1, 0) @ w2 + b2).argmax(1) == labels).mean()
        )
