"""Built pipelines walked task by task, in the file's order, with nothing of the runtime."""

from shardwright.building import build
from shardwright.ir import compile_graph
from shardwright.pipeline.fxtext import decode
from shardwright.planner import plan


def built(graph, devices, **options):
    return build(graph, plan(graph, devices), **options)


def walk(pipeline, inputs):
    """Outputs by name, from whole inputs by name: each task in the file's order."""
    held = {
        name: pipeline.weights.read(info.value, info)
        for name, info in pipeline.tensors.items()
        if info.value is not None
    }
    for name, part in pipeline.metadata.tensor_slices.inputs.items():
        held[name] = inputs[part.origin]
    groups = {}
    for name, task in pipeline.supertasks.items():
        if task.kind == "FX":
            infos = [pipeline.tensors[tensor] for tensor in task.inputs]
            program = compile_graph(decode(pipeline.data_of(name), infos))
            results = program([held[tensor] for tensor in task.inputs])
            held |= dict(zip(task.outputs, results, strict=True))
        elif task.kind == "send":
            groups[task.group] = held[task.inputs[0]]
        elif task.kind == "recv":
            held[task.outputs[0]] = groups.pop(task.group)
    assert not groups
    slices = pipeline.metadata.tensor_slices.outputs
    return {part.origin: held[name] for name, part in slices.items()}
