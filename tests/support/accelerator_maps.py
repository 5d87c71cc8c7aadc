"""Device maps of the tiny models over simulated accelerators with cpu and disk, and orders of streams."""

__all__ = ["LAYERS", "MIXED", "ORDERS"]

LAYERS = [f"model.layers.{index}" for index in range(4)]
MIXED = {
    "1+cpu+disk": {"": "sim:0", LAYERS[1]: "cpu", LAYERS[2]: "disk", LAYERS[3]: "disk"},
    "2+cpu+disk": {
        "": "sim:0",
        LAYERS[1]: "cpu",
        LAYERS[2]: "sim:1",
        LAYERS[3]: "disk",
        "model.norm": "sim:1",
        "lm_head": "sim:1",
    },
}
"""Maps of four layers: on one and on two accelerators, with cpu and disk."""
ORDERS = {
    "eager": {},
    "lazy": {"default": "lazy", "others": "lazy"},
    "slow": {"default": 30, "others": 300},
}
"""Arguments of the simulation's `streams` for each order of streams."""
