"""Findings: rules that name what costs time in a run, and the flag or action that helps.

docs/findings.md says when each rule is met.
"""

from __future__ import annotations

from .evidence import Evidence
from .rule import Advice, Finding, Observation, Rule
from .rules import RULES

__all__ = ["RULES", "Evidence", "Finding", "Rule", "find"]


def find(evidence: Evidence) -> list[Finding]:
    """The findings of all rules, the costliest first."""
    findings = []
    for rule in RULES:
        by_advice: dict[Advice, list[Observation]] = {}
        for seen in rule.check(evidence, rule.thresholds):
            ours, elsewhere = seen.advice or rule.advice, seen.advice_for_hooks or rule.advice_for_hooks
            by_advice.setdefault(ours if evidence.is_ours or elsewhere is None else elsewhere, []).append(seen)
        findings += [_finding(rule, advice, alike) for advice, alike in by_advice.items()]
    return sorted(findings, key=lambda finding: -finding.cost_s)


def _finding(rule: Rule, advice: Advice, alike: list[Observation]) -> Finding:
    first, *others = sorted(alike, key=lambda seen: -seen.cost_s)
    text = first.evidence[:1].upper() + first.evidence[1:]
    data = first.data
    costs: dict[str, float] = {}
    for seen in (first, *others):  # of several in one operation, only the costliest determines its time
        costs.setdefault(str(seen.data.get("operation")), seen.cost_s)
    if others:
        text += f". Also: {'; '.join(seen.title[:1].lower() + seen.title[1:] for seen in others)}"
        data = data | {"others": [seen.data for seen in others]}
    cost_s = sum(costs.values())
    return Finding(rule.name, first.title, text, advice.text, cost_s, data, first.phase, first.group, advice.remedy)
