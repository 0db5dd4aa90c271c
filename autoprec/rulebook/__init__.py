"""The rules: what a person can read and edit in ``rules/*.toml``, loaded and checked."""

from autoprec.rulebook.browse import RuleRow, list_rules, show_rule, test_rules
from autoprec.rulebook.families import families_of, kept_sites
from autoprec.rulebook.load import check_rules_match, load_rulebook
from autoprec.rulebook.opnames import canonical_op, known_ops
from autoprec.rulebook.rules import Family, FamilyRule, OpRule, Rulebook, ScalerPrior, SiteRule

__all__ = [
    "Family",
    "FamilyRule",
    "OpRule",
    "RuleRow",
    "Rulebook",
    "ScalerPrior",
    "SiteRule",
    "canonical_op",
    "check_rules_match",
    "families_of",
    "kept_sites",
    "known_ops",
    "list_rules",
    "load_rulebook",
    "show_rule",
    "test_rules",
]
