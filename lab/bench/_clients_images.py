"""Image scripts of the clients study, after public ones."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import primum
from lab.bench._clients import Images, Run, Script, digits, images, shuffled, started

ATTACH = "primum.attach(model, optimizer)"


def test_loss(model: nn.Module, data: Images) -> float:
    model.eval()
    with torch.no_grad():
        output = torch.cat([model(part) for part in data.test.split(500)])
    return float(F.cross_entropy(output, data.test_labels))


class Block(nn.Module):
    """Two convolutions with a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.around = nn.Sequential()
        if stride != 1 or inputs != outputs:
            conv = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.around = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.around(x))


class ResNet(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layers = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.linear = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layers(F.relu(self.bn1(self.conv1(x))))
        output: Tensor = self.linear(out.mean((2, 3)))
        return output


def resnet(run: Run) -> float:
    """SGD with momentum and weight decay, cosine schedule, random crops."""
    rng, data = started(run), images(run)
    model = ResNet(data.train.shape[1])
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    steps = run.few(150)
    scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    run.attach(model, optimizer)
    model.train()
    for rows in shuffled(len(data.train), 128, steps, rng):
        batch = F.pad(data.train[rows], (1, 1, 1, 1))
        top, left = torch.randint(3, (2,), generator=rng).tolist()
        side = data.train.shape[-1]
        batch = batch[:, :, top : top + side, left : left + side]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch), data.train_labels[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
    return test_loss(model, data)


class Scaled(nn.Module):
    """Scales down the initial logits, as in fast recipes."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 9


def fast_cnn(run: Run) -> float:
    """Nesterov, label smoothing, triangular schedule, no bias in the head, a sum as loss."""
    rng, data = started(run), images(run)

    def group(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.MaxPool2d(2),
            nn.BatchNorm2d(outputs, affine=False), nn.GELU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs, affine=False), nn.GELU(),
        )  # fmt: skip

    body = nn.Sequential(group(data.train.shape[1], 24), group(24, 48), nn.AdaptiveMaxPool2d(1))
    model = nn.Sequential(body, nn.Flatten(), nn.Linear(48, 10, bias=False), Scaled())
    batch, steps = 128, run.few(120)
    optimizer = optim.SGD(
        model.parameters(), lr=10 / batch, momentum=0.85, nesterov=True, weight_decay=0.0153 * 0.1
    )
    peak = max(1, steps // 4)

    def triangle(step: int) -> float:
        rise = 0.2 + 0.8 * step / peak
        return min(rise, 0.07 + 0.93 * (steps - step) / max(1, steps - peak))

    scheduler = optim.lr_scheduler.LambdaLR(optimizer, triangle)
    run.attach(model, optimizer)
    model.train()
    for rows in shuffled(len(data.train), batch, steps, rng):
        output = model(data.train[rows])
        labels = data.train_labels[rows]
        loss = F.cross_entropy(output, labels, label_smoothing=0.2, reduction="sum")
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        scheduler.step()
    return test_loss(model, data)


class Mnist(nn.Module):
    """Two convolutions, two linear layers, dropout, log-softmax."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 16, 3, 1, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, 1, padding=1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1 = nn.Linear(32 * (side // 2) ** 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = self.dropout2(F.relu(self.fc1(self.dropout1(x).flatten(1))))
        return F.log_softmax(self.fc2(x), dim=1)


def mnist_adadelta(run: Run) -> float:
    """Adadelta at a rate of 1, which falls by 0.7 after each epoch."""
    rng, data = started(run), images(run)
    model = Mnist(data.train.shape[1], data.train.shape[-1])
    optimizer = optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    run.attach(model, optimizer)
    batch, epochs = 64, 14
    per_epoch = run.few(len(data.train) // batch)
    for _ in range(1 if run.quick else epochs):
        model.train()
        for rows in shuffled(len(data.train), batch, per_epoch, rng):
            optimizer.zero_grad()
            loss = F.nll_loss(model(data.train[rows]), data.train_labels[rows])
            loss.backward()
            optimizer.step()
        scheduler.step()
    return test_loss(model, data)


class Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 400)
        self.fc21, self.fc22 = nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mean, log_var = self.fc21(hidden), self.fc22(hidden)
        drawn = mean + (0.5 * log_var).exp() * torch.randn_like(mean)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(drawn)))), mean, log_var

    def loss(self, x: Tensor) -> Tensor:
        found, mean, log_var = self(x)
        rest = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
        return F.binary_cross_entropy(found, x, reduction="sum") + rest


def vae(run: Run) -> float:
    """A decoder of 400 x 784 under a sum over pixels, with Adam."""
    rng = started(run)
    pixels, _ = digits()
    large = F.interpolate(pixels, size=(28, 28), mode="bilinear").flatten(1)
    train, test = large[:1536], large[1536:]
    model = Vae()
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    run.attach(model, optimizer, head="fc4")
    model.train()
    for rows in shuffled(len(train), 128, run.few(120), rng):
        optimizer.zero_grad()
        loss = model.loss(train[rows])
        loss.backward()
        optimizer.step()
    model.eval()
    torch.manual_seed(0)
    with torch.no_grad():
        return float(model.loss(test)) / len(test)


SCRIPTS = [
    Script("ResNet, SGD", "pytorch-cifar", resnet, {ATTACH: {}}),
    Script("fast CNN, Nesterov", "airbench", fast_cnn, {ATTACH: {}}),
    Script("CNN, Adadelta", "PyTorch examples: mnist", mnist_adadelta, {ATTACH: {}}),
    Script("VAE, Adam", "PyTorch examples: vae", vae,
           {'primum.attach(model, optimizer, head="fc4")': {},
            # As the stored results name it: max_iters was an argument of attach then.
            'primum.attach(model, optimizer, head="fc4", max_iters=5)':
                {"recipe": primum.Primum(max_iters=5)}},
           figure="test loss per image", seeds=3),
]  # fmt: skip
