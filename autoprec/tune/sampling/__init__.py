"""Who proposes the next mix, and what is believed of every mix."""
