"""A Solver and a Verifier: the Solver tries again if the Verifier says no. The task judges the last answer for both."""


def run(problem, client):
    turns = [{"role": "user", "content": f"{problem.question} Put the answer into \\boxed{{}}."}]
    solution = client.chat("solver", turns)
    shown = f"Problem: {problem.question}\nSolution: {solution.text}\nIs it right? Say yes or no, and why."
    report = client.chat("verifier", [shown])
    if "no" in report.text.lower():
        turns += [solution.message, {"role": "user", "content": report.text}]
        client.chat("solver", turns)
