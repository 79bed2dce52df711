"""Your own task and tool: lengths to convert, and a function that the Solver may call to convert them."""

from typing import Literal

from marsrl.rollout.tasks.own_task import OwnTask

CENTIMETRES = {"cm": 1, "m": 100, "km": 100_000}
Unit = Literal["cm", "m", "km"]


def convert(value: float, unit: Unit, to: Unit) -> str:
    """Converts a length from one unit to another."""
    return f"{value * CENTIMETRES[unit] / CENTIMETRES[to]:g} {to}"


class Lengths(OwnTask):
    """Questions for a length in another unit."""

    def problems(self):
        pairs = [("km", "m"), ("m", "cm"), ("cm", "m")]
        return [
            (
                f"Write {value} {unit} in {to}. Answer in \\boxed{{}}, without the unit.",
                convert(value, unit, to).split()[0],
            )
            for value in range(2, 30)
            for unit, to in pairs
        ]

    def reward(self, problem, answer):
        return float(answer.strip() == problem.answer)
