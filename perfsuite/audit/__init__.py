"""Check performance tables with arithmetic, data sheets and published bounds."""
