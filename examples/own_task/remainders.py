"""Your own task: remainders of divisions, generated here, with half a point for an answer that is off by one."""

from marsrl.rollout.tasks.own_task import OwnTask


class Remainders(OwnTask):
    """Questions for the remainder of a division by a small number."""

    class Options(OwnTask.Options):
        largest: int = 40  # task_options.largest
        one_off: float = 0.5

    def problems(self):
        divisors = (9, 10, 11)
        return [
            (f"What is the remainder of {number} divided by {divisor}? Answer in \\boxed{{}}.", str(number % divisor))
            for number in range(12, self.options.largest)
            for divisor in divisors
        ]

    def reward(self, problem, answer):
        # An answer that is not a number raises an error, so its reward is missing instead of 0.
        number, right = int(answer), int(problem.answer)
        if number == right:
            return 1.0
        return self.options.one_off if abs(number - right) == 1 else 0.0
