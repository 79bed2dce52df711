"""A Solver and a Verifier, as a program of its own: the Solver goes on where the Verifier says that it is wrong."""


def run(problem, client):
    turns = [{"role": "user", "content": problem.question}]
    solution = client.chat("solver", turns)
    shown = f"{problem.question} \n {solution.text}"
    report = client.chat("verifier", [{"role": "system", "content": "grade"}, {"role": "user", "content": shown}])
    says_right, is_right = "correct" in report.text, answers(solution, problem)
    if not says_right:
        turns += [solution.message, {"role": "user", "content": f"{report.text} fix"}]
        solution = client.chat("solver", turns)
    return {"solver": answers(solution, problem), "verifier": says_right == is_right}


def answers(solution, problem):
    """Does the solution end in the right answer?"""
    return solution.text.rpartition("Answer:")[2].strip() == problem.answer
