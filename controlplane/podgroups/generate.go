package podgroups

import (
	"context"
	"errors"
	"fmt"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dra-shared/dra-driver-shared/controlplane/claims"
)

// generate creates the claims that are missing, and deletes shards that no pod
// names any more.
func (r *Reconciler) generate(ctx context.Context, g *group) (err error) {
	writer := claims.ClaimWriter{Client: r.Client}
	for _, e := range g.entries {
		if e.ResourceClaimName != nil {
			continue
		}
		for _, n := range e.wanted {
			if e.shards[n] == nil {
				err = errors.Join(err, r.generateShard(ctx, writer, g, e, n))
			}
		}
		for n, claim := range e.shards {
			// One that is wanted again while it goes is made anew when it has gone.
			if !slices.Contains(e.wanted, n) {
				err = errors.Join(err, writer.Delete(ctx, claim), writer.Apply(ctx, claim, claims.ReleaseChange(claim, g.UID, false)))
				delete(e.shards, n)
			}
		}
	}
	return err
}

func (r *Reconciler) generateShard(ctx context.Context, writer claims.ClaimWriter, g *group, e *entry, n int) error {
	if e.template == nil {
		e.problem = fmt.Errorf("resourceClaims[%q].resourceClaimTemplateName: there is no ResourceClaimTemplate %s in namespace %s: create it", e.Name, *e.ResourceClaimTemplateName, g.Namespace)
		return nil
	}
	claim := claims.Generate(g.owner, e.Name, n, e.template)
	if n > 0 {
		first := e.shards[0]
		if first == nil || first.Status.Allocation == nil || first.DeletionTimestamp != nil {
			return nil // its devices are not known yet, or not for long; the event will come
		}
		var err error
		if claim, err = claims.GenerateShard(g.owner, e.Name, n, e.template, first, r.Driver); err != nil {
			e.problem = fmt.Errorf("resourceClaims[%q] has more pods than one claim can be reserved for: %w", e.Name, err)
			return nil
		}
	}
	err := writer.Create(ctx, claim)
	if taken := (*claims.NameTakenError)(nil); errors.As(err, &taken) || apierrors.IsInvalid(err) || apierrors.IsForbidden(err) {
		e.problem = fmt.Errorf("resourceClaims[%q]: %w", e.Name, err)
		return nil
	}
	if err == nil {
		e.shards[n] = claim
	}
	return err
}
