"""A model's attention before and after composition, what each branch of the composition adds, and ablations."""

from .analysis_page import analyse
from .branches import BRANCHES, ablated, branch_shares, branch_terms, branches_of, what_matters
from .diversity import effective_heads, head_diversity, map_diversity
from .head_maps import HeadMapStatistics, effective_rank, head_map_statistics, head_maps
from .picture import heat_map
from .recording import Recording, forwards, record, watch


__all__ = ["BRANCHES", "HeadMapStatistics", "Recording", "ablated", "analyse", "branch_shares", "branch_terms"]
__all__ += ["branches_of", "effective_heads", "effective_rank", "forwards", "head_diversity", "head_map_statistics"]
__all__ += ["head_maps", "heat_map", "map_diversity", "record", "watch", "what_matters"]
