// Copyright The dra-driver-shared Authors.
// SPDX-License-Identifier: Apache-2.0

package admission

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/dra-shared/dra-driver-shared/controlplane/metrics"
)

// denialReason is the reason why a request is denied. It is a label of the metric of denials and
// an annotation of the API server's audit log. Users see the message.
type denialReason string

const (
	// reasonInvalid means that a field or an annotation has a value that is not permitted.
	reasonInvalid denialReason = "Invalid"
	// reasonPodGroupMissing means that the PodGroup of the pod does not exist yet.
	reasonPodGroupMissing denialReason = "PodGroupMissing"
	// reasonPodGroupTerminating means that the PodGroup of the pod is being deleted.
	reasonPodGroupTerminating denialReason = "PodGroupTerminating"
	// reasonPriorityDiffers means that the pods of one PodGroup of Kubernetes must have one priority and one preemption
	// policy.
	reasonPriorityDiffers denialReason = "PriorityDiffers"
	// reasonSchedulerDiffers means that one scheduler must schedule the pods of one PodGroup of Kubernetes.
	reasonSchedulerDiffers denialReason = "SchedulerDiffers"
	// reasonConflict means that the pod requests the claims of two owners.
	reasonConflict denialReason = "Conflict"
	// reasonAnnotationDiffers means that the annotation of a pod or a template differs from its owner's.
	reasonAnnotationDiffers denialReason = "AnnotationDiffers"
	// reasonOwner means that the pod does not have an owner with claims to share: a Job or a replica.
	reasonOwner denialReason = "Owner"
	// reasonClaimMissing means that a ResourceClaim or ResourceClaimTemplate does not exist yet.
	reasonClaimMissing denialReason = "ClaimMissing"
	// reasonInUse means that pods may use the claims that the changed annotation lists.
	reasonInUse denialReason = "InUse"
	// reasonNotPermitted means that the user may not create ResourceClaims, or the controller may not hold the claim.
	reasonNotPermitted denialReason = "NotPermitted"
	// reasonNoRoom means that the claims of an entry serve as many pods as they can.
	reasonNoRoom denialReason = "NoRoom"
	// reasonQueue means that Kueue would never admit the pods, or charge their claims wrongly.
	reasonQueue denialReason = "Queue"
)

// deniedError is an error that the user can correct, or that is temporary. The request is denied
// with its message.
type deniedError struct {
	error
	reason denialReason
}

func denied(reason denialReason, format string, args ...any) error {
	return &deniedError{fmt.Errorf(format, args...), reason}
}

// auditReason is the key of the reason in the audit log, after the name of the webhook and a slash.
const auditReason = "denial-reason"

// errorResponse denies the request if err is a deniedError. Otherwise, it reports an internal error, and the API server
// lets the client retry.
func errorResponse(err error, warnings []string) admission.Response {
	var denial *deniedError
	if !errors.As(err, &denial) {
		return admission.Errored(http.StatusInternalServerError, err)
	}
	response := admission.Denied(err.Error()).WithWarnings(warnings...)
	response.AuditAnnotations = map[string]string{auditReason: string(denial.reason)}
	return response
}

// Denials counts the requests that webhooks deny.
type Denials struct {
	total *prometheus.CounterVec
}

// NewDenials returns a counter with the metric dra_shared_admission_denials_total.
func NewDenials(registry prometheus.Registerer) (*Denials, error) {
	total, err := metrics.RegisterCounter(registry, prometheus.CounterOpts{
		Name: "dra_shared_admission_denials_total",
		Help: "Requests that this replica denied at admission, by the kind of the object and the reason.",
	}, "kind", "reason")
	return &Denials{total}, err
}

// Count returns a handler that counts the denials of another one.
func (d *Denials) Count(handler admission.Handler) admission.Handler {
	return admission.HandlerFunc(func(ctx context.Context, req admission.Request) admission.Response {
		response := handler.Handle(ctx, req)
		if reason, ok := response.AuditAnnotations[auditReason]; ok {
			d.total.WithLabelValues(req.Kind.Kind, reason).Inc()
		}
		return response
	})
}
