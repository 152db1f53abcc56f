"""Plausibility of performance tables: what arithmetic, data sheets and published bounds do not allow."""
