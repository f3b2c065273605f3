"""Findings: rules that name what costs time in a run and the flag or action that helps.

docs/findings.md documents every rule and why its thresholds are what they are.
"""

from __future__ import annotations

from .evidence import Evidence
from .rule import Finding, Rule
from .rules import RULES

__all__ = ["RULES", "Evidence", "Finding", "Rule", "find"]


def find(evidence: Evidence) -> list[Finding]:
    """What the rules find, the costliest first."""
    findings = []
    for rule in RULES:
        for seen in rule.check(evidence, rule.thresholds):
            advice = seen.advice or rule.advice
            text = seen.evidence[:1].upper() + seen.evidence[1:]
            findings.append(Finding(rule.name, seen.title, text, advice, seen.cost_s, seen.data))
    return sorted(findings, key=lambda finding: -finding.cost_s)
