"""What is true of the tensors of a bank after any stream."""

import torch

from protokv.core.tensors import Tensors


def check_bank(tensors: Tensors, *, most: int = 1) -> None:
    """Assert that free slots are zeros, that Sigma is a covariance, and that masses agree with the
    counters.

    Args:
        tensors: of a bank, and perhaps of a whole memory.
        most: the mass with which a token may enter.
    """
    mass = tensors["bank.mass"]
    free = mass == 0
    assert (mass >= 0).all()
    assert ((tensors["bank.last_step"] >= 0) | free).all()
    per_slot = [
        name
        for name, one in tensors.items()
        if name.startswith("bank.") and one.shape[:3] == mass.shape
    ]
    for name in set(per_slot) - {"bank.mass", "bank.last_step"}:
        assert not ((tensors[name].flatten(3) != 0).any(3) & free).any(), name
    if "bank.covariance" in tensors:
        sigma = tensors["bank.covariance"]
        assert torch.equal(sigma, sigma.mT)
        assert (torch.linalg.eigvalsh(sigma) >= -1e-5).all()
    came = tensors["bank.opened"] + tensors["bank.absorbed"]
    assert (mass.sum(-1) <= most * came + tensors["bank.recycled"]).all()
    for name, tensor in tensors.items():
        assert not tensor.is_floating_point() or tensor.isfinite().all(), name
