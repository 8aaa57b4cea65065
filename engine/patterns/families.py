"""The pattern families: importing one here registers it, and makes it a public name of `headscope.engine`.

Budgets are counts of tokens, distances, windows or blocks; any of them may be a `Fraction` of the row's length,
resolved when the index is built.
"""

from headscope.engine.patterns.a_shape import AShape as AShape
from headscope.engine.patterns.base import Field as Field
from headscope.engine.patterns.base import Pattern as Pattern
from headscope.engine.patterns.block_sparse import BlockSparse as BlockSparse
from headscope.engine.patterns.budgets import LARGEST_BUDGET as LARGEST_BUDGET
from headscope.engine.patterns.budgets import Budget as Budget
from headscope.engine.patterns.budgets import Fraction as Fraction
from headscope.engine.patterns.dense import Dense as Dense
from headscope.engine.patterns.fixed import Fixed as Fixed
from headscope.engine.patterns.registry import FAMILIES as FAMILIES
from headscope.engine.patterns.registry import from_dict as from_dict
from headscope.engine.patterns.tri_shape import TriShape as TriShape
from headscope.engine.patterns.vertical_slash import VerticalSlash as VerticalSlash
