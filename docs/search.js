// Scores of the site's search: Sphinx's own, but pages of error messages come first where a page's
// text alone has the words. Most words of a message stand in many pages, with equal scores.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename]) => {
    const first = { "docs/troubleshooting": 10, "docs/clusters": 2 };
    return score + (score <= 5 && first[docname] ? first[docname] : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
