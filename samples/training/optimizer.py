"""AdamW with float32 master weights for a bfloat16 model, and its state as plain tensors.

bfloat16 products are several times as fast as float32 on some CPUs. But rounding would lose the
updates of a bfloat16 weight, so they are made on the masters and copied back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter


class MasterAdamW:
    """An optimiser of named parameters (any float dtype) with float32 copies; weight decay 0.02 on
    matrices only.
    """

    def __init__(
        self, named: Iterable[tuple[str, Parameter]], dtype: torch.dtype = torch.bfloat16
    ) -> None:
        """Copy the float32 parameters as masters, then convert the parameters to `dtype`, in
        place.
        """
        self.parameters = dict(named)
        self.masters = {
            n: p.detach().clone().float().requires_grad_() for n, p in self.parameters.items()
        }
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(dtype)
        groups = [
            {"params": [m for m in self.masters.values() if m.ndim > 1], "weight_decay": 0.02},
            {"params": [m for m in self.masters.values() if m.ndim < 2], "weight_decay": 0.0},
        ]
        self.adam = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), fused=True)

    def step(self, learning_rate: float, clip: float = 1.0) -> None:
        """Make one update from the gradients of the parameters, and clear the gradients."""
        for group in self.adam.param_groups:
            group["lr"] = learning_rate
        for name, parameter in self.parameters.items():
            self.masters[name].grad = None if parameter.grad is None else parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(
            [m for m in self.masters.values() if m.grad is not None], clip
        )
        self.adam.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into the model."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.masters[name])

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the model into the masters after a change by hand."""
        for name, parameter in self.parameters.items():
            if not torch.equal(parameter, self.masters[name].to(parameter.dtype)):
                self.masters[name].copy_(parameter)

    def tensors(self) -> dict[str, Tensor]:
        """Return the masters and the Adam moments as named float32 tensors."""
        found = {f"master.{n}": m.detach().clone() for n, m in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self.adam.state.get(master, {}).items():
                found[f"adam.{key}.{name}"] = value.detach().clone()
        return found

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the result of `tensors`; missing moments start from zero, missing parameters keep
        their values.
        """
        for name, master in self.masters.items():
            if f"master.{name}" not in tensors:
                continue
            with torch.no_grad():
                master.copy_(tensors[f"master.{name}"])
            keys = [k for k in ("step", "exp_avg", "exp_avg_sq") if f"adam.{k}.{name}" in tensors]
            if keys:
                self.adam.state[master] = {k: tensors[f"adam.{k}.{name}"].clone() for k in keys}
        self.publish()
