"""Spectral models as their authors write them: complex weights or real pairs, with Fourier transforms."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.zoo import B, assert_model_exact


class SpectralConv2d(nn.Module):
    """Li et al. 2020, "Fourier neural operator for parametric partial differential equations", arXiv:2010.08895."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        shape = (width, width, modes, modes)
        self.weights1 = nn.Parameter(torch.rand(shape, dtype=torch.complex128) / width**2)
        self.weights2 = nn.Parameter(torch.rand(shape, dtype=torch.complex128) / width**2)

    def forward(self, x):
        k, (height, width) = self.modes, x.shape[-2:]
        modes = torch.fft.rfft2(x)
        out = torch.zeros(len(x), x.shape[1], height, width // 2 + 1, dtype=modes.dtype, device=x.device)
        out[:, :, :k, :k] = torch.einsum("bixy,ioxy->boxy", modes[:, :, :k, :k], self.weights1)
        out[:, :, -k:, :k] = torch.einsum("bixy,ioxy->boxy", modes[:, :, -k:, :k], self.weights2)
        return torch.fft.irfft2(out, s=(height, width))


class FNO2d(nn.Module):
    def __init__(self, width: int = 4, modes: int = 2) -> None:
        super().__init__()
        self.lift = nn.Linear(3, width)
        self.spectral = nn.ModuleList(SpectralConv2d(width, modes) for _ in range(2))
        self.local = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(2))
        self.project = nn.Linear(width, 1)

    def forward(self, x):
        x = self.lift(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = F.gelu(spectral(x) + local(x))
        return self.project(x.permute(0, 2, 3, 1))


class GlobalFilter(nn.Module):
    """Rao et al. 2021, "Global filter networks for image classification", arXiv:2107.00645."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.complex_weight = nn.Parameter(torch.randn(size, size // 2 + 1, width, 2) * 0.02)

    def forward(self, x):
        N, T, C = x.shape
        size = int(T**0.5)
        modes = torch.fft.rfft2(x.view(N, size, size, C), dim=(1, 2), norm="ortho")
        modes = modes * torch.view_as_complex(self.complex_weight)
        return torch.fft.irfft2(modes, s=(size, size), dim=(1, 2), norm="ortho").reshape(N, T, C)


class GFNet(nn.Module):
    def __init__(self, width: int = 6, size: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 2, 2)
        self.positions = nn.Parameter(torch.zeros(1, size * size, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.filter = GlobalFilter(width, size)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        x = x + self.mlp(self.norms[1](self.filter(self.norms[0](x))))
        return self.head(x.mean(1))


def test_fourier_neural_operator():
    assert_model_exact(FNO2d(), {"x": torch.randn(B, 3, 8, 8)}, lambda output: output)


def test_global_filter_network():
    assert_model_exact(GFNet(), {"x": torch.randn(B, 3, 8, 8)}, lambda output: output)
