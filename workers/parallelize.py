"""From a stage of a model to its sharded form: tensor parallelism first, then FSDP2 over what is left.

The form outlives a generation: ``go_on`` puts it on the groups of the next one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, debug
from torch.distributed.tensor.parallel import parallelize_module

from checkpointing.layout import AXES, Layout
from workers.models.spec import ModelSpec


def make_mesh(device: torch.device, layout: Layout) -> DeviceMesh:
    """The mesh of ``layout`` over the default group: ``dp``, and the other axes that it has. All ranks must call it."""
    axes = tuple(axis for axis in AXES if axis == "dp" or getattr(layout, axis) > 1)  # each costs groups to form
    return init_device_mesh(device.type, tuple(getattr(layout, axis) for axis in axes), mesh_dim_names=axes)


def parallelize(module: nn.Module, spec: ModelSpec, mesh: DeviceMesh, layout: Layout, compute: torch.dtype) -> None:
    """Shard ``module`` in place over ``mesh`` (see ``make_mesh``). Gradients are summed over data ranks, not averaged.

    ``compute`` is the dtype of forward and backward; parameters, gradients and their reduction keep the stored dtype.
    """
    if layout.tp > 1:
        parallelize_module(module, mesh["tp"], spec.tp_plan(module))
    stored = next(module.parameters()).dtype
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=stored, cast_forward_inputs=spec.cast_inputs)
    data_mesh = mesh["r", "dp"] if layout.r > 1 else mesh["dp"]
    for unit in (*spec.fsdp_units(module), module):
        # A pipeline stage runs its module once per micro-batch, so it keeps what it has gathered. Of whole parameters
        # FSDP makes a copy, which is not worth making again for the backward pass.
        fully_shard(unit, mesh=data_mesh, mp_policy=policy, reshard_after_forward=layout.pp == 1 and layout.dp > 1)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            # The loss is divided by the global number of tokens already. The factor alone needs what gloo lacks.
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)


def go_on(module: FSDPModule, old: DeviceMesh, new: DeviceMesh) -> None:
    """Have ``module``, made over ``old``, run over the groups of ``new``; a step it was interrupted in is forgotten.

    ``old`` is of a generation that is over, ``new`` was made alike. A mesh knows its groups by name, and these are
    numbered anew in each generation, so the old one finds the new groups; only FSDP holds on to the groups themselves.
    """
    assert new._dim_group_names == old._dim_group_names, (old, new)
    if module._get_fsdp_state()._is_root is not None:  # what there is to reset is made by the first forward pass
        module.reset_iter_state()
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                group.mesh_info.__post_init__()  # asks its mesh for the groups
                for parameter in group.fsdp_params:  # what a backward pass had not reduced yet, which the reset leaves
                    parameter.unsharded_accumulated_grad = None
                    if hasattr(parameter, "_unsharded_param"):
                        parameter._unsharded_param.grad = None


def forget_meshes() -> None:
    """Drop what DTensor remembers of the meshes of earlier generations; call it before a new mesh is made.

    Its caches compare meshes by ranks and axis names, not by their groups: a new mesh with the ranks of an old one
    would be answered with the old one, whose groups are gone. They also keep those groups alive.
    """
    debug._clear_sharding_prop_cache()
    DTensor._op_dispatcher.sharding_propagator._propagate_tensor_meta_cached.cache_clear()
    _redistribute._gen_transform_infos.cache_clear()
    _redistribute.clear_redistribute_planner_cache()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
